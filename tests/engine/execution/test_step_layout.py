import random

import numpy as np
import torch

from tidegate.engine.execution.step_layout import BlockTables, RowSizes, StepLayout


def padded(tables: list[list[int]], width: int) -> list[list[int]]:
    return [table + [0] * (width - len(table)) for table in tables]


def test_kept_tables_are_what_the_rows_hold_now_however_that_changed() -> None:
    chance = random.Random(0)
    kept = BlockTables()
    tables: list[list[int]] = [[chance.randrange(99)]]
    for _ in range(300):
        match chance.randrange(5):
            case 0:
                tables.insert(chance.randrange(len(tables) + 1), [chance.randrange(99)])
            case 1 if len(tables) > 1:
                del tables[chance.randrange(len(tables))]
            case 2:  # one shared takes the place of its own
                table = chance.choice(tables)
                table[chance.randrange(len(table))] = chance.randrange(99)
            case 3:
                del chance.choice(tables)[1:]
            case _:
                chance.choice(tables).extend(chance.randrange(99) for _ in range(3))
        adapters = kept.of(tables)
        assert adapters.tolist() == padded(tables, adapters.shape[1])


def test_a_step_layout_gives_each_tokens_position_and_the_output_tokens() -> None:
    sizes = RowSizes(
        kinds=[7, 0, 7, 0],
        tokens=[3, 1, 2, 1],
        samples=[False, True, True, True],
        scored=[2, 0, 0, 0],
        adapters=["", "one", "", "two"],
    )
    layout = StepLayout(sizes)
    assert layout.order == [1, 3, 0, 2]
    assert layout.row_of_token.tolist() == [0, 1, 2, 2, 2, 3, 3]
    assert layout.token_indices.tolist() == [0, 0, 0, 1, 2, 0, 1]
    assert [
        (token_indices.first_row, token_indices.end_row) for token_indices in layout.ranges
    ] == [(0, 2), (2, 4)]
    assert [
        (token_indices.first_token, token_indices.end_token) for token_indices in layout.ranges
    ] == [(0, 2), (2, 7)]
    assert [token_indices.has_single_tokens for token_indices in layout.ranges] == [True, False]
    assert layout.output_tokens.tolist() == [
        0,
        6,
        1,
        3,
        4,
    ]  # sampled as the rows are given, then scored
    (one, token_indices), (two, others) = layout.adapters
    assert (one, two) == ("one", "two")
    assert token_indices is not None
    assert others is not None
    assert torch.equal(torch.cat([token_indices, others]), torch.from_numpy(np.array([0, 1])))
