"""What an init container runs to fetch a job's code: it needs git and a POSIX shell, and no Python."""

# Arguments: the URL, the ref ("" for the default branch), the commit ("" if it is not known), the origin that gets the
# password, the user there, the folder for the result, the folder of the Secret. Credentials are read from files only.
GIT = r"""
url=$1 ref=$2 commit=$3 origin=$4 user=$5 work=$6 secret=$7
fail() { echo "paceline: $1" >&2; exit 2; }
command -v git >/dev/null 2>&1 || fail "the image of this container has no git; name one that has it with --git-image"
HOME=$(umask 077; mktemp -d) || fail "cannot make a folder in /tmp"
trap 'rm -rf "$HOME"' EXIT
export HOME GIT_TERMINAL_PROMPT=0 GIT_ALLOW_PROTOCOL=https:http:ssh:git LC_ALL=C XDG_CONFIG_HOME=$HOME
set_option() { git config --global "$1" "$2"; }
set_option core.hooksPath /dev/null
set_option advice.detachedHead false
set_option gc.auto 0
set_option http.lowSpeedLimit 1
set_option http.lowSpeedTime 120
if [ -n "$origin" ] && [ -s "$secret/password" ]; then
    cp "$secret/password" "$HOME/password"
    printf %s "$user" >"$HOME/username"
    [ -s "$secret/username" ] && cat "$secret/username" >"$HOME/username"
    set_option "credential.$origin.helper" '!f() { test "$1" != get || {
        printf "username=%s\npassword=%s\n" "$(cat "$HOME/username")" "$(cat "$HOME/password")"; }; }; f'
fi
if [ -s "$secret/ssh-privatekey" ]; then
    (umask 077; cat "$secret/ssh-privatekey" >"$HOME/key"; echo >>"$HOME/key")
    checks="-o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=$HOME/known_hosts"
    if [ -s "$secret/known_hosts" ]; then
        checks="-o StrictHostKeyChecking=yes -o UserKnownHostsFile=$secret/known_hosts"
    fi
    export GIT_SSH_COMMAND="ssh -o BatchMode=yes -o IdentitiesOnly=yes -i $HOME/key $checks"
fi

rm -rf "$work/git" "$work/commit"
mkdir "$work/git" && cd "$work/git" || fail "cannot write to $work"
set_option safe.directory "$work/git"
found=
format=
[ ${#commit} -eq 64 ] && format=--object-format=sha256
git init --quiet --template= $format && git remote add -- origin "$url" || fail "cannot make a repository in $work"
get() { git fetch --quiet --no-tags "$@" 2>"$HOME/errors"; }
whole() { get origin '+refs/heads/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*'; }
parse() { git rev-parse --verify --quiet "$1^{commit}" >"$HOME/found" && found=$(cat "$HOME/found"); }
fetch() {
    if [ -n "$commit" ]; then
        get --depth=1 origin "$commit" && parse FETCH_HEAD && return
        whole && parse "$commit" && return
        return 1
    fi
    for name in ${ref:+"refs/heads/$ref"} ${ref:+"refs/tags/$ref"} "${ref:-HEAD}"; do
        get --depth=1 origin "$name" && parse FETCH_HEAD && return
        grep -qi "find remote ref" "$HOME/errors" || break
    done
    [ -n "$ref" ] && whole && parse "$ref"
}
for pause in 2 8 0; do
    fetch && break
    why=$(grep -E '^(fatal|error):' "$HOME/errors" | tail -n 1)
    [ -z "$why" ] && fail "cannot fetch $url: no branch, tag or commit ${commit:-$ref}"
    refusals='authentication failed|could not read (username|password)|error: 40[13]|permission denied'
    if grep -qiE "$refusals" "$HOME/errors"; then
        fail "cannot fetch $url: access is refused; name a Secret that allows it with --git-secret (${why#*: })"
    fi
    if grep -qiE 'not found|error: 404|does not exist' "$HOME/errors"; then break; fi
    sleep $pause
done
[ -n "$found" ] || fail "cannot fetch $url: ${why#*: }"
git checkout --quiet --detach --force "$found" || fail "cannot check out $found of $url"
if [ -e .gitmodules ]; then
    git submodule --quiet update --init --recursive --checkout --depth=1 ||
        git submodule --quiet update --init --recursive --checkout || fail "cannot fetch a submodule of $url"
fi
echo "$found" >"$work/commit"
echo "paceline: fetched $found of $url"
"""
