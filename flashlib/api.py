"""The public functions: each checks its arguments and calls an operator of
:mod:`flashlib.ops`.
"""

from flashlib import cache_checks, checks, ops


def attention(
    q, k, v, *, causal=False, window=None, softcap=None, alibi_slopes=None, score=None,
    bias=None, sinks=None, mask=None, dropout=None, seed=None, scale=None,
    method="auto", return_lse=False, deterministic=True, tune=False,
):  # fmt: skip
    """Exact attention, softmax(scale * Q K^T) V, for every batch and head.

    Parameters
    ----------
    q : tensor ``[B, H, T_q, d]``
        Queries; float32, float16 or bfloat16, on a CUDA device or the CPU, any strides,
        16 <= d <= 256.
    k : tensor ``[B, H_kv, T_k, d]``
        Keys, in the dtype and on the device of q. H must be a multiple of H_kv: query
        head h reads key head h // (H / H_kv).
    v : tensor ``[B, H_kv, T_k, d_v]``
        Values; d_v may differ from d, 16 <= d_v <= 256.
    causal : bool
        Query i sees key j only if j <= i + T_k - T_q: the mask is aligned to the
        bottom-right corner.
    window : (left, right) or None
        Query i, at position p = i + T_k - T_q, sees key j only if p - left <= j <= p +
        right; a side that is None has no limit. causal=True means right = 0. Blocks
        outside the window are skipped.
    softcap : float or None
        c, from 1e-30 to 1e30, replaces each score s by c tanh(s / c).
    alibi_slopes : tensor ``[H]`` or ``[B, H]``, float32, or None
        ALiBi: slope ``|p - j|`` is subtracted from each score, after the softcap.
        Finite; slopes get no gradient.
    score : :class:`flashlib.score_functions.Score` or None
        A function that replaces each score, after the softcap and ALiBi. Without a
        derivative, the call has no backward pass.
    bias : tensor that broadcasts to ``[B, H, T_q, T_k]``, or None
        Added to the scores, after all that replaces them; float32, float16 or bfloat16.
        -inf hides a key, and so may any number below -2e38. Its gradient has its own
        shape, so a small bias needs no T x T matrix.
    sinks : tensor ``[H]`` or None
        The score of one more key for each head, which every query sees and whose value
        is 0; float32, float16 or bfloat16, up to 2e38. lse counts it. Gets a gradient.
    mask : :class:`flashlib.masks.Mask`, boolean tensor, BlockLists or None
        Which keys a query sees, True where it does; a tensor broadcasts to ``[B, H,
        T_q, T_k]``. A key must also be visible by causal and window. Tiles in which no
        pair is visible are skipped (of a block of queries that sees no key, a kernel
        may read one), and a mask is evaluated only where a tile has visible and hidden
        pairs. A call lists its tiles; :class:`flashlib.block_lists.BlockLists` are
        lists for several calls.
    dropout : float or None
        Probability, less than 1, with which a weight is dropped after the softmax; the
        others are divided by 1 - dropout. lse does not change.
    seed : int, tensor int64 ``[1]`` on the device of q, or None
        Which weights dropout drops: those depend on it and their place in S alone, not
        on tiles. None draws a seed on the device of q, so that PyTorch's generator
        decides, also in a checkpoint or a CUDA graph.
    scale : float or None
        Factor that multiplies the scores; None means 1/sqrt(d).
    method : "auto", "standard", "flash1", "flash2" or "hopper"
        "standard" stores S and P in device memory, forward and backward. "flash1" and
        "flash2" are tiled, with keys and with queries in the outer loop; they share the
        tiled backward and use O(T) memory. "hopper" is "flash2", written for a GPU of
        compute capability 9.0. It takes

        - float16 or bfloat16, with d = d_v = 64, 128 or 256, or d = 192 and d_v = 128;
        - a last stride of 1, other strides and addresses in multiples of 16 bytes;
        - sinks, ALiBi, a softcap, a score and a bias;
        - causal, a window with a right side of 0, or a mask without a window.

        In the backward pass it leaves masks, ALiBi, a softcap, a score and a bias to
        "flash2" at d = 192 and 256, sinks at d = 192, and a bias's own gradient always.

        "auto" is "hopper" where that can run, except at d = 64 in the forward pass of a
        softcap, or of a bias that the copy engine cannot read: in another dtype than q,
        without a number for each pair, or with rows that are not multiples of 16 bytes.
        Otherwise, and always with tune or dropout, it is "flash2".
    return_lse : bool
        Also return the log-sum-exp of each row of scores.
    deterministic : bool
        Gradients are bitwise identical from run to run. False lets dQ be accumulated in
        no fixed order: by "flash1" and "flash2" in a backward pass with five products
        instead of seven, by "hopper" where d is 64, 128 or 192. "standard" remains
        deterministic, as do calls with anything that changes the scores.
    tune : bool
        On the first call for each configuration, time the tiles of the forward pass
        and keep the fastest; "auto" then means "flash2". Only on a GPU, without
        anything that changes the scores.

    Returns
    -------
    o : tensor ``[B, H, T_q, d_v]`` in the dtype of q
        or ``(o, lse)`` with lse ``[B, H, T_q]`` in float32, natural logarithm. A query
        that sees no key (T_k = 0 included) has o = 0, lse = -inf and zero gradients.

    Notes
    -----
    Keys and values must be finite, also where a mask hides them. Hide keys by ``mask``
    or -inf, not by large numbers: where all scores of a row are near one as large as
    -1e9, float32 cannot hold their differences from lse, and the gradients are wrong.

    Differentiable once, in reverse mode, through o and lse; works under
    ``torch.compile(fullgraph=True)``, but not under the transforms of ``torch.func``.
    Under autocast the inputs are cast to its dtype. On the CPU the kernels run in
    Triton's interpreter, where bfloat16 is computed in float32 and rounded.

    Raises TypeError or ValueError that names the argument, including for
    deterministic=False under ``torch.use_deterministic_algorithms(True)``;
    NotImplementedError for double backward, forward mode and torch.func.

    Source: chapters *Standard attention* (``eq-standard-attention``), *Gradients by
    hand*, *The backward pass*, *Hopper*, and *Masks* for window, softcap and slopes;
    Dao et al. (2022), Algorithms 1 and 4, for "flash1"; Dao (2024), Algorithms 1 and 2,
    for "flash2"; Shah et al. (2024) for "hopper".
    """
    checks.check_flags(return_lse=return_lse)
    if window is not None:
        window = checks.window_or_none(window)
    arguments = q, k, v, causal, scale, method, deterministic, tune
    dropout = checks.dropout_or_none(dropout)
    # To build the dict first and look for a value that is not None would cost a call
    # that changes no score about 5 % of its time on the host.
    if not (
        window is None and softcap is None and alibi_slopes is None and score is None
        and bias is None and sinks is None and mask is None and dropout is None
    ):  # fmt: skip
        changes = {
            "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes,
            "score": score, "bias": bias, "sinks": sinks, "mask": mask,
            "dropout": dropout,
        }  # fmt: skip
        o, lse = _attention(*arguments, changes, seed)
    else:
        if seed is not None:
            checks.check_seed(seed, q)
        composed = _composite.takes(*arguments)
        o, lse = (_composite.operator if composed else _attention)(*arguments)
    return (o, lse) if return_lse else o


def _attention(
    q, k, v, causal, scale, method, deterministic, tune, changes=None, seed=None
):  # fmt: skip
    """``(o, lse)`` of :func:`attention`; changes: what changes the scores, or None."""
    checks.check_method(method, tune, changes or {})
    checks.check_flags(causal=causal, deterministic=deterministic)
    checks.check_determinism(deterministic)
    q, k, v = ops.autocast(q, k, v)
    scale = checks.check_scale(scale, q)
    if changes:
        score_mod = checks.check_score_mod(
            q, k, v, causal=causal, scale=scale, seed=seed, **changes
        )
        return ops.attend_masked(q, k, v, score_mod, None, method)
    if method == "standard":
        return ops.standard(q, k, v, causal, scale)
    method = "tuned" if tune else method
    return ops.flash(q, k, v, causal, scale, method, deterministic)


def _unchanged(
    q: ops.Tensor, k: ops.Tensor, v: ops.Tensor, causal: bool, scale: float | None,
    method: str, deterministic: bool, tune: bool,
) -> ops.Pair:  # fmt: skip
    """:func:`_attention` without changes of the scores."""
    return _attention(q, k, v, causal, scale, method, deterministic, tune)


_composite = ops.Composite("attention", _unchanged)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """:func:`attention` with the arguments of PyTorch's function of this name.

    Parameters
    ----------
    query, key, value : tensors ``[N, H, L, E]``, ``[N, H, S, E]``, ``[N, H, S, Ev]``
        or without H; as q, k and v of :func:`attention`.
    attn_mask : tensor or None
        Broadcasts to ``[N, H, L, S]``, or to ``[N, L, S]`` where there is no H.
        Booleans say which keys a query sees; numbers are added to the scores, with a
        gradient.
    dropout_p : float
        Probability with which a weight is dropped. PyTorch's function drops others.
    is_causal : bool
        Query i sees key j only if j <= i: unlike ``causal`` of :func:`attention`, the
        mask is aligned to the top-left corner. Not together with attn_mask.
    scale : float or None
        Factor that multiplies the scores; None means 1/sqrt(E).
    enable_gqa : bool
        Whether key and value may have fewer heads, which divide those of query.

    Returns
    -------
    o : tensor ``[N, H, L, Ev]`` in the dtype of query
        without H where query has none. A query that sees no key gets zeros.

    Notes
    -----
    Raises the errors of :func:`attention`, and ValueError for another number of
    dimensions or of heads. Source: chapter *Masks*.
    """
    checks.check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    query, key, value = ops.autocast(query, key, value)
    q, k, v, attn_mask = checks.check_sdpa(query, key, value, attn_mask)
    checks.check_dropout(dropout_p, "dropout_p")
    if is_causal and attn_mask is not None:
        raise checks.wrong("is_causal", "False with attn_mask", True)
    if not enable_gqa and k.shape[1] != q.shape[1]:
        expected = f"the {q.shape[1]} heads of query without enable_gqa"
        raise checks.wrong("key", expected, k.shape[1])
    options = {"dropout": dropout_p, "scale": scale}
    if attn_mask is not None:
        added = attn_mask.dtype.is_floating_point
        options["bias" if added else "mask"] = attn_mask
    T_q, T_k = q.shape[2], k.shape[2]
    if is_causal and T_q > T_k:
        options["window"] = (None, T_q - T_k)  # a position is T_q - T_k before its row
    elif is_causal:
        options["causal"] = True
        k, v = k[:, :, :T_q], v[:, :, :T_q]  # nobody sees the others
    o = attention(q, k, v, **options)
    return o[:, 0] if query.ndim == 3 else o


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False,
    window=None, softcap=None, alibi_slopes=None, score=None, sinks=None, mask=None,
    dropout=None, seed=None, scale=None, return_lse=False,
):  # fmt: skip
    """Exact attention within each of B sequences that are packed one after another,
    without padding.

    Parameters
    ----------
    q : tensor ``[total_q, H, d]``
        Queries of all sequences, one after another; otherwise as in :func:`attention`.
    k, v : tensors ``[total_k, H_kv, d]`` and ``[total_k, H_kv, d_v]``
        Keys and values of all sequences, likewise.
    cu_seqlens_q, cu_seqlens_k : tensors ``[B + 1]``, int32, on the device of q
        Where sequences begin: sequence b has the rows cu_seqlens[b] to cu_seqlens[b +
        1] - 1. The first is 0 and the last is the number of rows; a length may be 0.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds on the lengths. They determine how many blocks are started for each
        sequence.
    causal, window, softcap, alibi_slopes, sinks, dropout, seed, scale, return_lse :
        As in :func:`attention`, for each sequence with its own lengths.
    mask : :class:`flashlib.masks.Mask` or None
        As in :func:`attention`; b is the number of a sequence, and positions are in it.
    score : :class:`flashlib.score_functions.Score` or None
        As in :func:`attention`, likewise.

    Returns
    -------
    o : tensor ``[total_q, H, d_v]`` in the dtype of q
        or ``(o, lse)`` with lse ``[H, total_q]`` in float32, natural logarithm. A query
        that sees no key has o = 0, lse = -inf and zero gradients.

    Notes
    -----
    Differentiable once, deterministically; autocast, torch.compile and the interpreter
    as in :func:`attention`. The forward pass runs the "hopper" kernel if that can read
    the tensors, unless there is a mask, slopes, a score, dropout, a window whose right
    side is not 0, or a softcap at d = 64.

    Raises the errors of :func:`attention`. The values in cu_seqlens are checked on a
    copy on the host, which waits for the device; under torch.compile and while a CUDA
    graph is captured they are not checked. Source: chapter *Masks*
    (``eq-masks-packed``).
    """
    checks.check_flags(causal=causal, return_lse=return_lse)
    q, k, v = ops.autocast(q, k, v)
    checks.check_qkv(q, k, v, sizes="[total, H, d]", batched=False)
    scale = checks.check_scale(scale, q)
    changes = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes}
    changes |= {"score": score, "sinks": sinks, "mask": mask}
    changes |= {"dropout": checks.dropout_or_none(dropout), "seed": seed}
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    packing = checks.check_sequences(q, k, *sequences)
    score_mod = checks.check_score_mod(
        q, k, v, causal=causal, scale=scale, packing=packing, **changes
    )
    o, lse = ops.attend_masked(q, k, v, score_mod, packing, "auto")
    return (o, lse) if return_lse else o


def decode(
    q, k_cache, v_cache, *, seq_lens, block_table=None, k_scales=None, v_scales=None,
    splits="auto", scale=None, window=None, softcap=None, score=None, sinks=None,
    mask=None, return_lse=False,
):  # fmt: skip
    """Exact attention of the last few positions of each sequence against its cache of
    keys and values.

    Parameters
    ----------
    q : tensor ``[B, H, T_q, d]``
        Queries of the last T_q of the seq_lens[b] keys of sequence b; each sees the
        keys up to its own position. Dtypes, devices, strides and head dimensions as in
        :func:`attention`.
    k_cache, v_cache : tensors ``[B, H_kv, T_max, d]`` and ``[B, H_kv, T_max, d_v]``
        Keys and values, in the dtype and on the device of q. With a block_table
        ``[pages, H_kv, page_size, d]`` and ``[pages, H_kv, page_size, d_v]``, page_size
        is 16, 32, 64, 128 or 256. The queries of all H / H_kv heads of a group share
        one pass over the cache, as many of them as a tile holds.
    seq_lens : tensor ``[B]``, int32
        Number of keys in each sequence, including those of q.
    block_table : tensor ``[B, max_pages]``, int32, or None
        The keys n page_size to (n + 1) page_size - 1 of sequence b are in page
        block_table[b, n]. Sequences may share pages.
    k_scales, v_scales : tensors ``[B, H_kv, T_max]``, float32, or None
        With caches in torch.float8_e4m3fn, on the CPU and on GPUs from compute
        capability 8.9 on, the scale of each key and of each value: the row in the cache
        times its scale, which is not negative; scales of values below 2^-100 count as
        2^-100. q is then float16 or bfloat16. With a block_table ``[pages, H_kv,
        page_size]``.
    splits : "auto" or int, 1 to 128
        The number of parts into which the keys of a sequence are divided; the parts are
        read in parallel and merged. "auto" chooses based on the longest sequence
        that the cache can hold.
    scale, return_lse :
        As in :func:`attention`.
    window : (left, right) or None
        A query at position p sees only keys p - left <= j; a left side of None has no
        limit. The right side has no effect: no query sees a key after its own.
    softcap, score, sinks :
        As in :func:`attention`; the functions of a score get positions in a sequence. A
        sink is counted once, when the splits are merged.
    mask : :class:`flashlib.masks.Mask`, boolean tensor or None
        Which of these keys a query sees; a tensor broadcasts to ``[B, H, T_q, keys]``,
        with a column for each key that the cache can hold of a sequence. Keys that it
        hides are read all the same, except those before a window that is the mask, or
        is combined with others by ``&``. Tensors that a Mask reads by position, such as
        ids of documents, must have an element for each of the seq_lens[b] keys.

    Returns
    -------
    o : tensor ``[B, H, T_q, d_v]`` in the dtype of q
        or ``(o, lse)`` with lse ``[B, H, T_q]`` in float32, natural logarithm. A query
        that sees no key (an empty sequence, or fewer keys than queries) has o = 0 and
        lse = -inf.

    Notes
    -----
    Of sequence b, the kernel reads the keys and values that some query sees, at
    positions max(0, seq_lens[b] - T_q - left) to seq_lens[b] - 1, and the entries of
    block_table for their pages. All other rows of the cache may hold anything, also NaN
    and infinity, and all other entries may be any integers. So once all positions of a
    page are before the windows of all later calls, you may give the page to another
    sequence: leave its column in the table, and do not change seq_lens. Values that are
    read must be finite: every query of the call multiplies them, by 0 where it does not
    see them.

    The call never waits for the device, so a CUDA graph can capture it. For the same
    reason, the values in seq_lens and block_table are not checked; a wrong value makes
    the kernel read another sequence's memory. Nor is it checked that the tensors of a
    Mask reach to the last key; beyond its end a tensor repeats its last element. Works
    under ``torch.compile(fullgraph=True)``; autocast does not change the call.

    Raises TypeError or ValueError that names the argument; NotImplementedError if a
    gradient is requested. Source: chapter *Decoding* (``eq-decoding-merge``,
    ``eq-decoding-table``); Dao et al., "Flash-Decoding" (2023); Kwon et al.,
    "PagedAttention" (2023).
    """
    checks.check_flags(return_lse=return_lse)
    splits, scale = cache_checks.check_splits(splits), checks.check_scale(scale, q)
    cache = k_cache, v_cache, seq_lens, block_table, k_scales, v_scales
    left, *functions = cache_checks.check_changes_of_decode(
        q, cache, window, softcap, score, mask
    )
    o, lse = ops.decode(q, cache, sinks, splits, left, scale, *functions)
    return (o, lse) if return_lse else o


def decode_latent(
    q, cache, *, d_c, scale, seq_lens, block_table=None, scales=None, splits="auto",
    method="auto", return_lse=False,
):  # fmt: skip
    """Exact attention of the last few positions of each sequence against its cache of
    latents, which all heads share.

    Parameters
    ----------
    q : tensor ``[B, H, T_q, d_c + d_r]``
        Absorbed queries of the last T_q of the seq_lens[b] positions of sequence b: the
        columns without rotation times the transpose of W_K of their head, then the d_r
        rotary columns. Each sees the positions up to its own. Dtypes, devices and
        strides as in :func:`attention`.
    cache : tensor ``[B, T_max, d_c + d_r]``
        A latent and its rotary columns for each position, in the dtype and on the
        device of q. With a block_table ``[pages, page_size, d_c + d_r]``, page_size is
        16, 32, 64, 128 or 256: ``pages`` of a
        :class:`flashlib.kvcache.PagedLatentCache`. Or in torch.float8_e4m3fn, on the
        CPU and on GPUs from compute capability 8.9 on, with even d_c and d_r.
    scales : tensor ``[B, T_max, 2]``, float32, or None
        With a cache in torch.float8_e4m3fn, the scales of the latent and of the rotary
        columns of each position, not negative; those of latents below 2^-100 count as
        2^-100. q is then float16 or bfloat16. With a block_table ``[pages, page_size,
        2]``: ``scales`` of the PagedLatentCache.
    d_c : int, 8 to 512
        Columns of a latent; the rest, 1 to 128 columns, is rotary.
    scale : float
        Factor on the scores, 1/sqrt(d) with d the columns of a query before it was
        absorbed.
    seq_lens, block_table, splits, return_lse :
        As in :func:`decode`.
    method : str
        "latent" for Triton's kernel, "hopper" for the one written for Hopper GPUs,
        which takes float16 and bfloat16, d_c = 512 with 64 rotary columns, and pages of
        64, 128 or 256 rows. "auto" is "hopper" where it can run.

    Returns
    -------
    o : tensor ``[B, H, T_q, d_c]`` in the dtype of q
        Sums of latents: the output of head h is its part times W_V of the head. Or
        ``(o, lse)`` with lse ``[B, H, T_q]`` in float32, natural logarithm. A query
        that sees no position has o = 0 and lse = -inf.

    Notes
    -----
    The kernel reads a row of a sequence once for its key and its value, and for as many
    queries and heads as a tile holds (64 on Hopper). It reads nothing after the end of
    a sequence, and no entry of block_table for the pages there. As in :func:`decode`,
    it never waits for the device, values of seq_lens and block_table are not checked,
    and autocast does not change the call.

    Raises TypeError or ValueError that names the argument, also if "hopper" is asked
    for and cannot run; NotImplementedError if a gradient is requested; ValueError on a
    GPU before compute capability 8.0. Source: chapter *Latent attention*
    (``eq-latent-absorb``, ``eq-latent-output``); DeepSeek-AI, "DeepSeek-V2" (2024).
    """
    checks.check_flags(return_lse=return_lse)
    cache_checks.check_latent_method(method)
    cache_checks.check_latent_width(q, d_c)
    splits = cache_checks.check_splits(splits)
    scale = checks.check_number("scale", scale)
    tensors = q, cache, seq_lens, block_table, scales
    o, lse = ops.decode_latent(*tensors, splits, d_c, scale, method)
    return (o, lse) if return_lse else o
