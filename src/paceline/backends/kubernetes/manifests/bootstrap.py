"""What a pod runs first. It compiles in Python 2.7 too, so that an old Python in an image gets a message."""

# It joins the pieces of the archive and of the code, which came in ConfigMaps, and becomes the program in the archive.
# The archive is unpacked: from a folder, the processes after the first read their modules as bytecode.
# The first process of a container ignores signals that it does not handle, so that comes first of all.
START = r"""
import signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
import glob, json, os
here, work, message = sys.argv[1:4]
def refuse(why):
    sys.stderr.write("paceline: " + why + chr(10))
    try:
        with open(message, "w") as file:
            file.write(json.dumps({"state": "FAILED", "exit_code": 2, "refused": why}))
    except (IOError, OSError):
        pass
    sys.exit(2)
if sys.version_info < (3, 9):
    found = sys.executable + " in the image is Python " + ".".join(map(str, sys.version_info[:3]))
    refuse(found + ", too old; name Python 3.9 or newer with --image-python, take another image, or add --plain")
import gzip, io, runpy, shutil, zipfile
def join(name, path):
    with open(path, "wb") as whole:
        for piece in sorted(glob.glob(os.path.join(here, name + "-*"))):
            with open(piece, "rb") as file:
                shutil.copyfileobj(file, whole)
try:
    archive, package = os.path.join(work, "paceline.gz"), os.path.join(work, "package")
    join("archive", archive)
    with gzip.open(archive) as source, zipfile.ZipFile(io.BytesIO(source.read())) as whole:
        whole.extractall(package)
    os.unlink(archive)
    part = os.path.join(work, "part.json")
    shutil.copyfile(os.path.join(here, "part.json"), part)
    packed = os.path.join(work, "joined.gz")
    join("code", packed)
    if os.path.getsize(packed):
        with gzip.open(packed) as source, open(os.path.join(work, "code.tar"), "wb") as target:
            shutil.copyfileobj(source, target)
    os.unlink(packed)
except (OSError, EOFError, zipfile.BadZipFile) as error:
    refuse("cannot unpack the job in " + work + ": " + str(error))
entry = os.path.join(package, "paceline", "node", "__main__.py")
sys.path[0], sys.argv = os.path.dirname(entry), [entry, "pod", part, message]  # as if this Python had been started so
runpy.run_path(entry, run_name="__main__")
"""
