#!/bin/sh
# Compare protos/ with the commit since which embedding.v1 is a promise (promised-since beside this),
# or with the commit before this one where a clone does not hold that. Usage: breaking.sh BUF
set -eu
cd "$(dirname "$0")/../.."
buf=$1

read -r promised _ <ops/buf/promised-since
against=
for commit in "$promised" HEAD~1; do
    if git cat-file -e "$commit:protos" 2>/dev/null; then
        against=$commit
        break
    fi
done
if [ -z "$against" ]; then
    echo "buf breaking: this clone has no earlier commit with protos/ to compare with"
    exit 0
fi

# The vendored module of today serves the old protos too, so that any commit can be compared.
old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
git archive "$against" protos | tar -x -C "$old" -f -
mkdir -p "$old/ops/buf"
cp -R ops/buf/vendor "$old/ops/buf/vendor"
"$buf" breaking --config ops/buf/buf.yaml --against "$old" --against-config ops/buf/buf.yaml
echo "buf breaking: nothing since $against breaks readers or writers"
