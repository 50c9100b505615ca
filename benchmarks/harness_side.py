"""Run lm-evaluation-harness on HellaSwag from a local file.

    python harness_side.py FOLDER FILE LIMIT BATCH_SIZE

harness_race.py runs this with a Python that has `lm_eval`; it imports nothing of ours. The task is
the harness's own, except for the source of its rows. Rows without ctx_a and ctx_b already hold the
harness's preparation as ctx. Prints one JSON line: the scores of every example, and the seconds of
tokens and model.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import numpy as np
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

TASK = """\
task: hellaswag_file
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{file}"}}}}
output_type: multiple_choice
validation_split: validation
process_docs: !function rows.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ROWS = """\
from lm_eval.tasks.hellaswag import utils


def process_docs(dataset):
    if "ctx_a" in dataset.column_names:
        return utils.process_docs(dataset)
    return dataset.map(
        lambda row: {
            "query": utils.preprocess(row["activity_label"] + ": " + row["ctx"]),
            "choices": [utils.preprocess(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }
    )
"""


def main() -> None:
    folder, file, limit, batch_size = (
        sys.argv[1],
        Path(sys.argv[2]).resolve(),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    model = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=batch_size)
    ask, seconds = model.loglikelihood, []

    def ask_timed(*arguments: object, **named: object) -> object:
        start = time.perf_counter()
        answers = ask(*arguments, **named)
        seconds.append(time.perf_counter() - start)
        return answers

    model.loglikelihood = ask_timed
    with tempfile.TemporaryDirectory() as tasks, tempfile.TemporaryDirectory() as cache:
        Path(tasks, "task.yaml").write_text(TASK.format(file=file).replace("metadata:", ""))
        Path(tasks, "rows.py").write_text(ROWS)
        os.environ["HF_DATASETS_CACHE"] = cache
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=["hellaswag_file"],
            limit=limit or None,
            task_manager=TaskManager(include_path=tasks),
            bootstrap_iters=0,
            log_samples=True,
        )
    samples = sorted(results["samples"]["hellaswag_file"], key=lambda sample: sample["doc_id"])
    log_p = [[float(response[0]) for response in sample["filtered_resps"]] for sample in samples]
    lengths = [[float(len(choice)) for choice in sample["doc"]["choices"]] for sample in samples]
    answer = {
        "pred": [int(np.argmax(row)) for row in log_p],
        "pred_norm": [
            int(np.argmax(np.array(row) / size)) for row, size in zip(log_p, lengths, strict=True)
        ],
        "right": [[sample["acc"], sample["acc_norm"]] for sample in samples],
        "gold": [int(sample["doc"]["gold"]) for sample in samples],
        "log_p": log_p,
        "scores": results["results"]["hellaswag_file"],
        "seconds": sum(seconds),
        "version": lm_eval.__version__,
    }
    print(json.dumps(answer, default=str))


main()
