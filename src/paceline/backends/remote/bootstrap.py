"""What runs on a host first, over ssh. Both programs compile in Python 2.7 too, so that an old Python can be named."""

BEGINS = "paceline-begins-5d1e"  # what the shell of a host prints before READ runs: its start-up files may print, too

# Nothing in the home folder, where it starts, may shadow what it imports. It is one line, which any shell takes.
READ = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; "
    'line = getattr(sys.stdin, "buffer", sys.stdin).readline().decode("utf-8", "replace"); '
    'whole = line[:1] == chr(34) and line[-2:] == chr(34) + "\\n"; '
    'lost = "sys.stdout.write(json.dumps(dict(input_lost=1)) + chr(10))"; '
    "exec(json.loads(line) if whole else lost)"
)

# The archive gets the bytecode of this Python beside its modules, or every request and every rank would compile them
# anew; another Python passes over it. Whoever can write to the archive, or put another one in its place, runs as this
# user: so nobody else may be able to change any part of its path.
BEGIN = r"""
import binascii, os, stat
stdin = getattr(sys.stdin, "buffer", sys.stdin)
def say(answer):
    sys.stdout.write(json.dumps(answer) + chr(10))
    sys.stdout.flush()
def add_bytecode(archive):
    import importlib.util, marshal, zipfile
    head = importlib.util.MAGIC_NUMBER + bytes([1]) + bytes(11)  # 1: not to be compared with the source
    with zipfile.ZipFile(archive, "a") as packed:
        for name in packed.namelist():
            if name.startswith("paceline/"):
                try:
                    code = compile(packed.read(name), path + "/" + name, "exec", dont_inherit=True)
                except SyntaxError:  # what ranks import may need a newer Python, which they may have
                    continue
                packed.writestr(zipfile.ZipInfo(name + "c"), head + marshal.dumps(code))
def is_whole(archive):  # whether it has the end of an archive with files: zipfile takes as long as all the rest here
    with open(archive, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 22))
        end = file.read()
    return end[:4] == b"PK\x05\x06" and end[8:10] != bytes(2)
class Unsafe(Exception):
    pass
def refuse(part, status, why):
    try:
        import pwd
        owner = pwd.getpwuid(status.st_uid).pw_name
    except (ImportError, KeyError):
        owner = "user %d" % status.st_uid
    raise Unsafe("%s (owner %s, mode %04o) %s" % (part, owner, stat.S_IMODE(status.st_mode), why))
def is_own_group(gid):  # the group of this user alone, as many systems make one for each user
    try:
        import grp, pwd
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except (ImportError, KeyError):
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= set([user.pw_name])
def writable(status):
    others = 0o002 if is_own_group(status.st_gid) else 0o022
    return status.st_mode & others
def check(path):
    part, rest, links, sticky = "/", path.split("/"), 0, False
    status = os.lstat(part)
    while True:
        if status.st_uid not in (0, os.getuid()):
            refuse(part, status, "belongs to somebody else")
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > 40:
                refuse(part, status, "is one of too many links")
            target = os.readlink(part)
            rest[:0] = target.split("/")
            part = "/" if target.startswith("/") else os.path.dirname(part)
        elif not writable(status):
            sticky = False
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and any(rest):
            sticky = True  # what is in it stays its owner's
        else:
            refuse(part, status, "can be written to by others")
        while rest and rest[0] in ("", "."):
            rest.pop(0)
        if not rest:
            return
        name = rest.pop(0)
        part = os.path.dirname(part) if name == ".." else os.path.join(part, name)
        status = os.lstat(part)
def is_usable(archive):
    if not os.path.lexists(archive):
        return False
    check(archive)
    status = os.lstat(archive)
    if not stat.S_ISREG(status.st_mode):
        refuse(archive, status, "is no regular file")
    return is_whole(archive)
order = json.loads(stdin.readline().decode())
request = stdin.readline()
if sys.version_info < (3, 9):
    found = sys.executable + " is Python " + ".".join(map(str, sys.version_info[:3]))
    say({"error": found + ", too old; name Python 3.9 or newer with --ssh-python, or python = in the settings"})
    sys.exit()
root = os.path.abspath(os.path.expanduser(order["root"]))
path = os.path.join(root, order["name"])
try:
    folder = root
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if folder != root:
        check(os.path.join(folder, "."))
    os.makedirs(root, mode=0o700, exist_ok=True)
    check(root)
    if is_usable(path):
        say({"need": False})
    else:
        coming = path + "." + binascii.hexlify(os.urandom(8)).decode()  # hosts that share a home share pids, too
        descriptor = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w+b") as file:
                say({"need": True})
                size = int(stdin.readline() or 1)
                data = stdin.read(size)
                file.write(data)
                if len(data) < size:
                    sys.exit()
                add_bytecode(file)
                file.flush()
                os.fsync(descriptor)  # or it may be empty after a loss of power
            if not is_whole(coming):
                raise OSError(0, "the archive of paceline came damaged")
            try:
                os.link(coming, path)
            except FileExistsError:  # another was as quick, and processes may use what it brought; or it is damaged
                if not is_usable(path):
                    os.replace(coming, path)
            except OSError:  # no hard links here
                os.replace(coming, path)
        finally:
            if os.path.exists(coming):
                os.unlink(coming)
except Unsafe as error:
    say({"error": str(error) + ", so others could run code as you; let only you own and write to that path"
        " (chown, chmod go-w), or choose another root with --ssh-root, or root = in the settings"})
    sys.exit()
except OSError as error:
    say({"error": "cannot write to " + root + ": " + str(error.strerror) + "; choose another root in the settings"})
    sys.exit()
sys.path.insert(0, path)  # there may be another paceline
from paceline.node.host.serve import main
sys.path.append(sys.path.pop(0))
main(root, request)
"""
