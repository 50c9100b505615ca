#!/usr/bin/env bash
# Install a wheel in a new environment and train with it where no compiler is found:
#   .ci/check_wheel.sh PYTHON TORCH WHEEL
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "$2" "$(realpath "$3")"
cd "$folder"

isolated() { env -i HOME="$folder" PATH="$folder/venv/bin" "$@"; }

isolated megatoken doctor
isolated python -c '
from megatoken.model.native import build, library, selection

for name in build.INSTRUCTION_SETS:
    path = selection.FOLDER / build.library_name(name)
    print(f"loads: {library.Library(name, path).name}")
'
isolated megatoken prepare python --tokenizer bytes --out data
for instruction_set in "" portable; do
    isolated MEGATOKEN_INSTRUCTION_SET=$instruction_set megatoken train quickstart \
        --out "run$instruction_set" data.path=data data.tokenizer=bytes \
        budget.steps=5 sample.every=0
done
isolated megatoken sample run "def main():" --tokens 20
printf 'checked: %s, %s, %s\n' "$(isolated python -V)" \
    "$(isolated python -c 'import torch; print("torch", torch.__version__)')" "$(basename "$3")"
