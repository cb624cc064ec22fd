from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import refused
from transformers import get_scheduler

from adapterswap.experiments.training.recipe import TrainingOptions
from adapterswap.experiments.training.report import choose_schedule, total_steps
from adapterswap.kit.errors import FieldError


def rates(options: TrainingOptions, steps: int) -> list[float]:
    """The learning rate of every step, as transformers' scheduler gives it."""
    name, warmup, further = choose_schedule(options, steps)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=further)
    result = []
    for _ in range(steps):
        result.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return result


def test_warmup_stable_decay() -> None:
    result = rates(TrainingOptions(schedule="warmup_stable_decay", warmup=0.1, decay=0.4), 10)
    assert result == pytest.approx([0, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_linear_constant_and_cosine() -> None:
    assert rates(TrainingOptions(warmup=2), 6) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    assert rates(TrainingOptions(schedule="constant", warmup=0), 3) == [1, 1, 1]
    cosine = rates(TrainingOptions(schedule="cosine", warmup=0), 4)
    assert cosine == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


def test_invalid_schedules_are_refused() -> None:
    with refused(FieldError, "training.warmup", match="500 .* 60 steps"):
        choose_schedule(TrainingOptions(warmup=500), 60)
    with refused(FieldError, "training.warmup", match=r"6 .* 5 of training\.decay"):
        choose_schedule(TrainingOptions(schedule="warmup_stable_decay", warmup=0.6, decay=0.5), 10)


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "epochs"), [(37, 8, 2, 3), (37, 8, 2, 0.5), (1, 8, 4, 1), (64, 4, 4, 2.3)]
)
def test_steps_match_the_trainer(tmp_path: Path, rows: int, batch: int, accumulation: int, epochs: float) -> None:
    import datasets
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        use_cpu=True,
    )
    data = datasets.Dataset.from_dict({"input": list(range(rows))})
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=data)
    *_, steps = trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())
    options = TrainingOptions(batch_size=batch, gradient_accumulation=accumulation, epochs=epochs)
    assert total_steps(rows, options) == steps
