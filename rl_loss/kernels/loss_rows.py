"""What a loss makes of some rows and their entries, inside its kernel.

`rl_loss.loss.definition` is what it computes. Entries are read twice: for the sums that decide
what a row is, then for what depends on them. What no loss reads is loaded with the rest, so that
no load waits for another, and replaced before any arithmetic.
"""

import triton
import triton.language as tl

from rl_loss.csr import TOLERANCE
from rl_loss.kernels.loss_sums import row_sums
from rl_loss.kernels.loss_terms import (
    KL_FORWARD,
    KL_NONE,
    KL_REVERSE,
    KL_SQUARED,
    RULE_REINFORCE,
    estimate,
    exact,
    is_finite,
    one_sided,
    weigh,
    weigh_tail,
)
from rl_loss.kernels.records import KIND_DRAWS, KIND_HEAD, KIND_NONE, KIND_REPLAY

NEAR = tl.constexpr(TOLERANCE)


@triton.jit
def _read(values, at, there, on, ACC: tl.constexpr):
    """What stands at some places, 0 where not `on`."""
    return tl.where(on, tl.load(values + at, mask=there, other=0).to(ACC), 0.0)


@triton.jit
def _entries(
    entry, held, drawn, acts, tensors, numbers,
    RULE: tl.constexpr, KL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Some entries of each row `[R, W]`: valid, log p, log q, p, q, their part of the expected
    score, of the divergence and its slope; those of draws before they are divided by their number.
    """
    log_p_at, log_q_at, valid_at = tensors
    _, _, _, bound, limit, cap = numbers
    valid = held
    if valid_at is not None:
        valid = held & (tl.load(valid_at + entry, mask=held, other=0) != 0)
    log_p = _read(log_p_at, entry, held, valid, ACC)
    log_q = _read(log_q_at, entry, held, valid, ACC)
    p = tl.where(valid, tl.exp(log_p), 0.0)
    q = tl.where(valid, tl.exp(log_q), 0.0)
    weight, _ = weigh(log_p, log_q, limit, cap, RULE)
    score = tl.where(valid, tl.where(drawn, weight, q * weight), 0.0)
    value = tl.zeros_like(score)
    slope = value
    if (KL == KL_FORWARD) | (KL == KL_REVERSE):
        one, one_slope = estimate(log_p - log_q, bound, KL)
        value, slope = exact(log_p, log_q, KL)
        value = tl.where(valid & acts, tl.where(drawn, one, value), 0.0)
        slope = tl.where(valid & acts, tl.where(drawn, one_slope, slope), 0.0)
    return valid, log_p, log_q, p, q, score, value, slope


@triton.jit
def rows_loss(
    row,  # [R] int64
    there,  # [R] bool
    tokens, evidence, entries, out, numbers, N, nnz,
    RULE: tl.constexpr,
    KL: tl.constexpr,
    KEPT_ALONE: tl.constexpr,
    CENTERED: tl.constexpr,
    WITH_REF: tl.constexpr,
    SLOPES: tl.constexpr,
    ENTRY_SLOPES: tl.constexpr,
    EPS: tl.constexpr,
    W: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Writes the loss of some rows and its slopes; gives what they add to the sums
    `[R, COLUMNS]`."""
    mask_at, log_p_at, log_q_at, advantages_at, weights_at, ref_at = tokens
    offsets_at, kind_at, mass_at, tail_at = evidence
    per_token_at, slopes_at = out
    adv_tau, kl_tau, ref_tau, bound, limit, cap = numbers
    nan = float("nan")
    minus_inf = float("-inf")

    # --- the sampled tokens ---
    on = tl.load(mask_at + row, mask=there, other=0) != 0
    log_p = _read(log_p_at, row, there, on, ACC)
    log_q = _read(log_q_at, row, there, on, ACC)
    advantage = _read(advantages_at, row, there, on, ACC)
    zero = tl.zeros_like(log_p)
    w = on.to(ACC)
    if weights_at is not None:
        w = _read(weights_at, row, there, on, ACC)
    log_ratio = log_p - log_q
    weight, kept = weigh(log_p, log_q, limit, cap, RULE)
    weight = tl.where(on, weight, 0.0)
    kept = kept & on
    acts = on
    if KEPT_ALONE:
        acts = kept

    # --- the evidence: what a row's entries add up to ---
    mass = zero
    if mass_at is not None:
        mass = _read(mass_at, row, there, on, ACC)
    if kind_at is not None:
        kind = tl.load(kind_at + row, mask=there, other=0).to(tl.int64)
    else:
        kind = tl.where(mass > 0, KIND_HEAD, KIND_REPLAY).to(tl.int64)
    kind = tl.where(on, kind, KIND_NONE)
    bad = on & ((kind < KIND_NONE) | (kind > KIND_DRAWS))
    size, sum_p, sum_q, gap, score, known_kl = zero, zero, zero, zero, zero, zero
    draws = kind == KIND_DRAWS
    if offsets_at is not None:
        begin = tl.load(offsets_at + row, mask=there, other=0)
        end = tl.load(offsets_at + row + 1, mask=there, other=0)
        broken = (begin < 0) | (end < begin) | (end > nnz)
        broken = broken | ((row == 0) & (begin != 0)) | ((row == N - 1) & (end != nnz))
        end = tl.where(broken & there, begin, end)
        bad = bad | (broken & on)
        read = tl.where(kind > KIND_NONE, end, begin)
        lane = tl.arange(0, W)[None, :]
        n_valid = tl.zeros_like(lane + begin[:, None]).to(tl.int32)
        n_wrong = n_valid
        p_in, q_in = n_valid.to(ACC), n_valid.to(ACC)
        gap_in, score_in, kl_in = n_valid.to(ACC), n_valid.to(ACC), n_valid.to(ACC)
        for first in range(0, tl.max(read - begin, axis=0), W):
            entry = begin[:, None] + first + lane
            held = entry < read[:, None]
            valid, lp, lq, p, q, part, kl_part, _ = _entries(
                entry, held, draws[:, None], acts[:, None], entries, numbers, RULE, KL, ACC
            )
            wrong = valid & ((is_finite(lq) & (lq <= NEAR) & is_finite(lp)) == 0)
            wrong = wrong | (held & (valid == 0) & draws[:, None])
            n_valid += valid.to(tl.int32)
            n_wrong += wrong.to(tl.int32)
            p_in += p
            q_in += q
            gap_in += tl.abs(p - q)
            score_in += part
            kl_in += kl_part
        size = tl.sum(n_valid, axis=1).to(ACC)
        bad = bad | (tl.sum(n_wrong, axis=1) > 0)
        sum_p, sum_q, gap = tl.sum(p_in, axis=1), tl.sum(q_in, axis=1), tl.sum(gap_in, axis=1)
        score, known_kl = tl.sum(score_in, axis=1), tl.sum(kl_in, axis=1)
    usable = size > 0
    modelled = usable & (draws == 0)
    share = tl.where(draws, 1.0 / tl.maximum(size, 1.0), 1.0)
    score *= share
    known_kl *= share

    # --- the tail ---
    q_tail = tl.where(modelled, mass, 0.0)
    if tail_at is not None:
        log_p_tail = _read(tail_at, row, there, on, ACC)
    else:
        rest = 1 - sum_p
        some = modelled & ((q_tail > 0) | (kind == KIND_HEAD)) & (rest > 8 * EPS)
        log_p_tail = tl.where(some, tl.log(tl.where(some, rest, 1.0)), minus_inf)
    bad = bad | (modelled & ((log_p_tail != log_p_tail) | ((q_tail >= -NEAR) == 0)))
    bad = bad | (modelled & ((tl.abs(q_tail + sum_q - 1) <= NEAR) == 0))
    some = modelled & (log_p_tail > minus_inf)
    has_tail = some & (q_tail > 0)
    log_q_tail = tl.log(tl.where(q_tail > 0, q_tail, 1.0))
    log_p_tail = tl.where(some, log_p_tail, 0.0)
    p_tail = tl.where(some, tl.exp(log_p_tail), 0.0)
    q_tail = tl.where(q_tail < 0, 0.0, q_tail)
    tail_weight, inexact = weigh_tail(log_p_tail, log_q_tail, limit, cap, RULE)
    tail_score = tl.where(has_tail, q_tail * tail_weight, 0.0)
    score += tail_score

    # --- value and slopes ---
    scale = -adv_tau * advantage * w
    by_token = scale * weight
    value = by_token
    if RULE == RULE_REINFORCE:
        value = scale * log_p
    by_tail = zero
    if CENTERED:
        by_tail = -scale * tail_score
    kl_share = kl_tau * w
    divergence = zero
    if KL != KL_NONE:
        divergence, slope = estimate(tl.where(acts, log_ratio, 0.0), bound, KL)
        if KL != KL_SQUARED:
            two, two_slope = exact(log_p_tail, log_q_tail, KL)
            one, one_slope = one_sided(p_tail, q_tail, KL)
            known_kl += tl.where(modelled & acts, tl.where(has_tail, two, one), 0.0)
            divergence = tl.where(usable, known_kl, divergence)
            slope = tl.where(usable, 0.0, slope)
            tail_slope = tl.where(has_tail, two_slope, one_slope)
            by_tail += kl_share * tl.where(modelled & acts, tail_slope, 0.0)
        value += kl_share * divergence
        by_token += kl_share * slope
    bad = bad | (on & ((is_finite(log_p) & is_finite(log_q)) == 0)) | (log_q > NEAR)
    from_ref = zero
    if ref_at is not None:
        ref = _read(ref_at, row, there, on, ACC)
        from_ref, slope = estimate(ref - log_p, bound, KL_FORWARD)
        if WITH_REF:
            value += ref_tau * w * from_ref
            by_token -= ref_tau * w * slope
            bad = bad | (is_finite(ref) == 0)
    value = tl.where(on, tl.where(bad, nan, value), 0.0)
    tl.store(per_token_at + row, value, mask=there)
    if SLOPES:
        tl.store(slopes_at + row, tl.where(bad, nan, by_token), mask=there)
        tl.store(slopes_at + N + row, tl.where(bad, nan, by_tail), mask=there)

    # --- the entries' slopes; the norm of the expected score, which takes its sum ---
    l1 = tl.abs(tail_score - p_tail * score)
    if offsets_at is not None:
        spread = zero
        if tail_at is None:  # the tail's slope is then one of the known ids
            spread = tl.where(p_tail > 0, by_tail / tl.where(p_tail > 0, p_tail, 1.0), 0.0)
        last = read
        if ENTRY_SLOPES:
            last = end
        l1_in = tl.zeros_like(p_in)
        for first in range(0, tl.max(last - begin, axis=0), W):
            entry = begin[:, None] + first + lane
            valid, _, _, p, _, part, _, kl_slope = _entries(
                entry, entry < read[:, None], draws[:, None], acts[:, None], entries, numbers,
                RULE, KL, ACC,
            )  # fmt: skip
            part *= share[:, None]
            l1_in += tl.where(valid, tl.abs(part - p * score[:, None]), 0.0)
            if ENTRY_SLOPES:
                by_entry = tl.zeros_like(part)
                if CENTERED:
                    by_entry = -scale[:, None] * part
                if (KL == KL_FORWARD) | (KL == KL_REVERSE):
                    by_entry += kl_share[:, None] * (kl_slope * share[:, None])
                if tail_at is None:
                    by_entry -= spread[:, None] * p
                by_entry = tl.where(bad[:, None], nan, by_entry)
                tl.store(slopes_at + N + N + entry, by_entry, mask=entry < end[:, None])
        l1 += tl.sum(l1_in, axis=1)

    distance = (gap + tl.abs(p_tail - q_tail)) / 2
    return row_sums(
        value, on, kept, acts, usable, modelled, log_ratio, size, sum_p, q_tail, distance, l1,
        has_tail & inexact, divergence, from_ref, KL != KL_NONE, ref_at is not None,
    )  # fmt: skip
