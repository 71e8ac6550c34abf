"""What is kept of a row in each precision, and what comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.history.precision import Cast, Scaled, codec_for

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [INT8, FLOAT8]
WIDTHS = [1, 3, 12, 16, 100]

eight_bits = pytest.mark.parametrize("dtype", EIGHT_BITS)
every = pytest.mark.parametrize("dtype", [*FLOATING, *EIGHT_BITS])


def kept(rows: Tensor, dtype: torch.dtype, wanted: torch.dtype = torch.float32) -> Tensor:
    """Rows after they were kept in a type."""
    codec = codec_for(dtype, rows.size(1))
    return codec.decode(codec.encode(rows), wanted)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("width", WIDTHS)
def test_floating_point_rows_take_their_values(dtype: torch.dtype, width: int) -> None:
    codec = codec_for(dtype, width)
    assert isinstance(codec, Cast)
    assert (codec.width, codec.raw_width, codec.dtype, codec.raw_dtype) == (width, width, dtype, dtype)


@eight_bits
@pytest.mark.parametrize(
    ("width", "raw_width"), [(1, 16), (3, 16), (12, 16), (13, 32), (16, 32), (28, 32), (100, 112), (256, 272)]
)
def test_rows_of_eight_bits_take_a_scale_and_whole_words(dtype: torch.dtype, width: int, raw_width: int) -> None:
    codec = codec_for(dtype, width)
    assert isinstance(codec, Scaled)
    assert (codec.width, codec.raw_width, codec.dtype, codec.raw_dtype) == (width, raw_width, dtype, torch.uint8)
    raw = codec.encode(torch.randn(5, width))
    assert (raw.shape, raw.dtype, raw.is_contiguous()) == ((5, raw_width), torch.uint8, True)
    assert not raw[:, 4 + width :].any()


def test_a_row_of_int8_byte_by_byte() -> None:
    raw = codec_for(INT8, 3).encode(torch.tensor([[254.0, -2.0, 0.0]]))
    assert raw.tolist() == [[0, 0, 0, 64, 127, 255, 0, *[0] * 9]]  # 2.0, 127, -1, 0


def test_a_row_of_float8_byte_by_byte() -> None:
    raw = codec_for(FLOAT8, 3).encode(torch.tensor([[896.0, -2.0, 0.0]]))
    assert raw.tolist() == [[0, 0, 0, 64, 0x7E, 0xB8, 0, *[0] * 9]]  # 2.0, 448, -1, 0


@every
@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_never_written_is_zero(dtype: torch.dtype, width: int) -> None:
    codec = codec_for(dtype, width)
    raw = torch.zeros(4, codec.raw_width, dtype=codec.raw_dtype)
    assert torch.equal(codec.decode(raw, torch.float32), torch.zeros(4, width))


@every
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_zeros_are_exact(dtype: torch.dtype, width: int) -> None:
    assert torch.equal(kept(torch.zeros(2, width), dtype), torch.zeros(2, width))
    assert torch.equal(kept(torch.full((2, width), -0.0), dtype), torch.zeros(2, width))


@every
@pytest.mark.parametrize("width", WIDTHS)
def test_no_rows(dtype: torch.dtype, width: int) -> None:
    codec = codec_for(dtype, width)
    raw = codec.encode(torch.empty(0, width))
    assert (raw.shape, raw.dtype) == ((0, codec.raw_width), codec.raw_dtype)
    assert codec.decode(raw, torch.float32).shape == (0, width)


@pytest.mark.parametrize("exponent", [-100, -7, -1, 0, 3, 100])
def test_int8_is_exact_if_the_greatest_is_127_times_a_power_of_two(exponent: int) -> None:
    rows = torch.stack([torch.arange(-127.0, 128.0), torch.arange(127.0, -128.0, -1.0)]) * 2.0**exponent
    assert torch.equal(kept(rows, INT8), rows)


@pytest.mark.parametrize("exponent", [-100, -7, -1, 0, 3, 100])
def test_float8_is_exact_if_the_greatest_is_448_times_a_power_of_two(exponent: int) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits[(bits & 127) != 127].view(FLOAT8).float()  # all but NaN; the greatest of them is 448
    rows = values[None] * 2.0**exponent
    assert torch.equal(kept(rows, FLOAT8), rows)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_int8_is_off_by_half_a_step_at_most(width: int, scale: float) -> None:
    rows = torch.randn(200, width) * scale
    greatest = rows.abs().amax(1, keepdim=True)
    assert bool(((kept(rows, INT8) - rows).abs() <= greatest / 254 * (1 + 1e-5)).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_float8_is_off_by_a_sixteenth_at_most(width: int, scale: float) -> None:
    rows = torch.randn(200, width) * scale
    step = rows.abs().amax(1, keepdim=True) / 448
    normal = rows.abs() >= step * 2**-6
    error = (kept(rows, FLOAT8) - rows).abs()
    assert bool((error <= rows.abs() * (2**-4 + 1e-6))[normal].all())
    # Below the normal values steps are equal, as in int8.
    assert bool((error <= step.expand_as(rows) * (2**-10 + 1e-6))[~normal].all())


@eight_bits
def test_the_greatest_value_of_a_row_is_kept(dtype: torch.dtype) -> None:
    rows = torch.randn(200, 8)
    greatest = rows.abs().amax(1)
    torch.testing.assert_close(kept(rows, dtype).abs().amax(1), greatest, rtol=2e-7, atol=0.0)


@eight_bits
def test_each_row_has_its_own_scale(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 8)
    apart = torch.cat([kept(row[None] * size, dtype) for row, size in zip(rows, (1e-20, 1.0, 1e20), strict=True)])
    assert torch.equal(kept(rows * torch.tensor([[1e-20], [1.0], [1e20]]), dtype), apart)


def test_beside_one_huge_value_int8_loses_what_float8_keeps() -> None:
    row = torch.tensor([[1270.0, 4.0, -6.0, -0.5]])
    assert kept(row, INT8).tolist() == [[1270.0, 0.0, -10.0, 0.0]]
    row = torch.tensor([[3584.0, 4.0, -6.0, -0.5]])
    assert kept(row, FLOAT8).tolist() == row.tolist()
    row = torch.tensor([[1e30, 1.0, -1.0, 0.0]])
    for dtype in EIGHT_BITS:
        assert kept(row, dtype).tolist() == torch.tensor([[1e30, 0.0, 0.0, 0.0]]).tolist()


@eight_bits
def test_rows_too_small_for_normal_numbers_do_not_overflow(dtype: torch.dtype) -> None:
    tiny = torch.finfo(torch.float32).tiny
    # The least number there is times all of these would fit 8 bits only with a scale below the least.
    rows = 2.0**-149 * torch.tensor([[190.0, 1.0], [600.0, -600.0], [1.0, 0.0]])
    assert torch.equal(kept(rows, dtype), torch.zeros(3, 2))
    row = torch.tensor([[-3.0, 100.0]]) * tiny
    error = (kept(row, dtype) - row).abs()
    assert bool((error <= torch.maximum(row.abs() / 16, torch.tensor(tiny / 2))).all())


@eight_bits
def test_negative_zero_is_zero(dtype: torch.dtype) -> None:
    assert torch.equal(kept(torch.tensor([[-0.0, 1.0]]), dtype), torch.tensor([[0.0, 1.0]]))


@every
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_not_finite(dtype: torch.dtype, odd: float) -> None:
    rows = torch.tensor([[1.0, odd, -1.0], [1.0, -1.0, 1.0]])
    got = kept(rows, dtype)
    assert not got[0, 1].isfinite()
    assert torch.equal(got[1], rows[1])


@eight_bits
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("width", WIDTHS)
def test_one_value_that_is_not_finite_makes_the_row_nan(dtype: torch.dtype, odd: float, width: int) -> None:
    rows = torch.ones(3, width)
    rows[1, -1] = odd
    codec = codec_for(dtype, width)
    raw = codec.encode(rows)
    assert bool(raw[1, :4].view(torch.float32).isnan())  # whatever the values became
    got = codec.decode(raw, torch.float32)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[::2], torch.ones(2, width))


@eight_bits
def test_double_values_beyond_single_make_the_row_nan(dtype: torch.dtype) -> None:
    assert bool(kept(torch.tensor([[1e300, 1.0]], dtype=torch.float64), dtype).isnan().all())


@eight_bits
@pytest.mark.parametrize("given", FLOATING)
@pytest.mark.parametrize("wanted", FLOATING)
def test_rows_are_taken_and_given_in_any_type(dtype: torch.dtype, given: torch.dtype, wanted: torch.dtype) -> None:
    rows = torch.randn(5, 12).to(given)
    got = kept(rows, dtype, wanted)
    assert got.dtype == wanted
    assert torch.equal(got, kept(rows.float(), dtype).to(wanted))


@eight_bits
def test_rows_need_not_lie_one_behind_the_other(dtype: torch.dtype) -> None:
    wide = torch.randn(6, 8)
    for rows in (wide.t(), wide[::2], wide[:, 2:5], wide[:, :1], wide[:1].expand(4, 8), wide[:, :1].expand(6, 5)):
        codec = codec_for(dtype, rows.size(1))
        before = rows.clone()
        raw = codec.encode(rows)
        assert torch.equal(raw, codec.encode(rows.contiguous()))
        assert torch.equal(rows, before)
        for count in (1, 2):  # pieces of raw rows as well
            piece = codec.decode(raw[1 : 1 + count], torch.float32)
            assert torch.equal(piece, codec.decode(raw, torch.float32)[1 : 1 + count])


@eight_bits
def test_decoding_leaves_raw_rows_alone(dtype: torch.dtype) -> None:
    codec = codec_for(dtype, 5)
    raw = codec.encode(torch.randn(4, 5))
    before = raw.clone()
    codec.decode(raw, torch.float32).fill_(7.0)
    assert torch.equal(raw, before)


@eight_bits
def test_rows_that_were_kept_once_stay_as_they_are(dtype: torch.dtype) -> None:
    once = kept(torch.randn(50, 12), dtype)
    torch.testing.assert_close(kept(once, dtype), once, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2], ids=lambda dtype: str(dtype)
)
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"eight bits with a scale for each row, but got {dtype}\. Use a floating"):
        codec_for(dtype, 4)
