"""DeepMath's columns become a prompt and a solution; on a file with its columns, for the hub is far away."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from lit_rl.tasks.deepmath import deepmath


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows = {
        "question": ["What is 1 + 1?", "What is $i^2$?"],
        "final_answer": ["2", "-1"],
        "difficulty": [1.0, 5.5],
        "topic": ["Arithmetic", "Complex numbers"],
        "r1_solution_1": ["long", "longer"],
    }
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


def test_a_question_becomes_a_prompt_that_asks_for_a_box(file: str) -> None:
    rows = deepmath("parquet", data_files=file)
    assert sorted(rows.column_names) == ["difficulty", "prompt", "solution", "topic"]
    [message] = rows[1]["prompt"]
    assert message["role"] == "user"
    assert message["content"] == "What is $i^2$?\n\nReason step by step, and put the final answer within \\boxed{}."
    assert (rows[1]["solution"], rows[1]["topic"]) == ("-1", "Complex numbers")


def test_questions_are_chosen_by_difficulty(file: str) -> None:
    assert deepmath("parquet", data_files=file, min_difficulty=5)["solution"] == ["-1"]
    assert deepmath("parquet", data_files=file, max_difficulty=5)["solution"] == ["2"]
