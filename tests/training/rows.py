"""Rows to train on, and weights to compare."""

import torch


def packed_rows(count, length=12, seed=0):
    """Rows with one to three documents and every number of labels from none to all."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 40, (length,), generator=generator)
        labels = ids.clone()
        labels[: (number * 5) % (length + 1)] = -100
        starts = torch.tensor([0, *range(3, length, 4)][: 1 + number % 3])
        rows.append({"input_ids": ids, "labels": labels.index_fill(0, starts, -100), "starts": starts})
    return rows


def padded_rows(count, length=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(0, 40, (length,), generator=generator)
        padding = (number * 4) % length
        mask = (torch.arange(length) >= padding).long()  # on the left; rows 0, 3, ... have none
        rows.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


def collate_padded(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
