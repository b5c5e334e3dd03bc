"""What a pod runs first. It compiles in Python 2.7 too, so that an old Python in an image gets a message."""

# It joins the pieces of the code, which came in several ConfigMaps, and becomes the node's program in the archive.
START = r"""
import glob, json, os, sys
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
import gzip, shutil
try:
    part = os.path.join(work, "part.json")
    shutil.copyfile(os.path.join(here, "part.json"), part)
    pieces = sorted(glob.glob(os.path.join(here, "code-*")))
    if pieces:
        packed = os.path.join(work, "code.tar.gz")
        with open(packed, "wb") as whole:
            for piece in pieces:
                with open(piece, "rb") as file:
                    shutil.copyfileobj(file, whole)
        with gzip.open(packed) as source, open(os.path.join(work, "code.tar"), "wb") as target:
            shutil.copyfileobj(source, target)
        os.unlink(packed)
except (OSError, EOFError) as error:
    refuse("cannot unpack the job in " + work + ": " + str(error))
archive = os.path.join(here, "paceline.pyz")
os.execv(sys.executable, [sys.executable, archive, "pod", part, message])
"""
