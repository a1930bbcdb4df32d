"""DeepMath-103K: hard questions of mathematics with checked answers (arXiv 2504.11456), for ``math_accuracy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."

KEPT = ("difficulty", "topic")


def deepmath(
    path: str = "zwhe99/DeepMath-103K",
    split: str = "train",
    *,
    instruction: str = INSTRUCTION,
    min_difficulty: float | None = None,
    max_difficulty: float | None = None,
    **load: Any,
) -> Dataset:
    """The questions as prompts.

    Args:
        path: Hub id, folder, or a builder such as ``parquet`` with ``data_files``.
        split: Which split.
        instruction: Said after the question.
        min_difficulty: Leaves easier questions out; the scale goes from 1 to 9, with -1 for unknown.
        max_difficulty: Leaves harder ones out.
        load: More arguments of ``datasets.load_dataset``.

    Returns:
        Columns ``prompt`` (a message list), ``solution`` (LaTeX), ``difficulty`` and ``topic``.
    """
    from datasets import load_dataset

    rows = load_dataset(path, split=split, **load)
    if min_difficulty is not None or max_difficulty is not None:
        low = min_difficulty if min_difficulty is not None else float("-inf")
        high = max_difficulty if max_difficulty is not None else float("inf")
        rows = rows.filter(lambda difficulty: low <= difficulty <= high, input_columns="difficulty")

    def as_prompt(row: dict[str, Any]) -> dict[str, Any]:
        content = f"{row['question']}\n\n{instruction}"
        return {"prompt": [{"role": "user", "content": content}], "solution": row["final_answer"]}

    return rows.map(as_prompt, remove_columns=[name for name in rows.column_names if name not in KEPT])
