"""Implement the records 44 and 89 a second time, for the tests: one process, float64, no buckets,
explicit loops.

This code follows the records' descriptions, not train_gpt.py and frontier.py. If the results
differ, one of them is wrong.
"""

from __future__ import annotations

import math
import re

import torch

import frontier

COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def rms(x):
    """Normalize the last dimension to a root mean square of 1."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def rotary(x, freqs):
    """Rotate x [T, heads, head_dim] by its positions."""
    T, _, D = x.shape
    out = torch.empty_like(x)
    for t in range(T):
        c = (t * freqs).cos()
        s = (t * freqs).sin()
        x1 = x[t, :, : D // 2]
        x2 = x[t, :, D // 2 :]
        out[t] = torch.cat([x1 * c + x2 * s, x2 * c - x1 * s], -1)
    return out


def token_weights(p, name, x, scale=0.1):
    """Compute the weights of each token by a small network, [T, n]."""
    u = x @ p[f"{name}.hidden"].T
    u = u * (1 + torch.erf(u / math.sqrt(2))) / 2
    return (u @ p[f"{name}.out"].T + p[f"{name}.bias"]) * scale


def layer_rows(words):
    """Return rows of frontier.Layer for words as in loss()."""
    rows = []
    for word in words.split():
        letters, _, skip_from = word.partition("+")
        digit = re.search(r"\d", letters)
        adds = [name for letter, name in (("i", "x0"), ("n", "ngrams")) if letter in letters]
        rows.append(
            frontier.Layer(
                {"S": "short", "L": "long", "P": "paired", "r": "removed"}.get(
                    letters.strip("cM")[:1], "none"
                ),
                narrow={"": "", "q": "qk", "qv": "qkv"}["".join(x for x in letters if x in "qv")],
                value_table=digit and int(digit[0]),
                xsa="x" in letters,
                gated="g" in letters,
                dc="d" in letters,
                reads_backout="c" in letters,
                adds=" ".join(adds),
                mlp=letters.count("M"),
                skip_from=int(skip_from) if skip_from else None,
            )
        )
    return tuple(rows)


RECORD_89 = "PinM S0xinM P1inM LxginM SxinM PinM M+3 SxinM cS2inM cP3inM cL4gdM"
RECORD_92 = "PqinM Sqv0xinM Pq1iM LxgM rinM PqinM M+3 ri cSqv2MM rnM cL3gM"
RECORD = "- S1M S2M SM LM SM SM+5 M+4 SM+3 S0M+2 S1M+1 L2M"


def loss(
    p,
    x,
    y,
    long,
    short,
    bos,
    heads,
    freqs=None,
    scale=0.1,
    added=0,
    softcap=(30, 0, 7.5),
    layers=RECORD,
    backout_layer=8,
    ahead=(1,),
    ngrams=None,
    gates_from=(),
    dc_window=112,
    prefixes=None,
    prefix_weight=0,
    narrow_scale=0.13,
    longest=None,
):
    """Compute the weighted sum of the cross entropies of the tokens 1, 2, … ahead, with weights
    `ahead`.

    p: parameters by name, float64. x, y: lists of tokens. Record 44, and added [T, dim] on the
    residual stream before the first layer. With gates_from records 89 and 92: layers at which gates
    per token are computed; ngrams [T, dim]: n-gram embeddings; dc_window: tokens that d sees;
    prefixes, prefix_weight: another token to predict in place of each, or -1, and its weight.
    softcap: cap, shift, softness. Record 92: narrow_scale in place of scale where queries and keys
    are narrow; longest: attention treats so many tokens of a document as another document.

    layers: one word per layer. L: long window; S: short window; P: heads j and j + heads / 2 share
    one softmax; c: attention reads the output of backout_layer; digit: value table; x: XSA; g:
    gates of the heads; d: DC; M: MLP, MM: two; +n: skip connection from layer n; q, v: half as many
    entries of queries and keys, of values; r: factors of a layer with attention; i, n: adds x0,
    n-gram embeddings. In records 89 and 92 the unrotated entries of a key are those of the previous
    token in layers with L.
    """
    layers = layers.split()
    late = bool(gates_from)
    count = len(layers)
    T = len(x)
    dim = p["embed.weight"].shape[1]
    D = dim // heads
    if freqs is None:
        freqs = torch.cat(
            [(1 / 1024) ** torch.linspace(0, 1, D // 4), torch.zeros(D // 4)]
        ).double()
    n = sum("+" in word for word in layers)
    mixes = 0 if late else 2
    skips = list(p["scalars"][:n])
    lam = p["scalars"][n : n + mixes * count].view(count, mixes)
    rest = p["scalars"][n + mixes * count :]
    sa = rest[: 2 * count].view(count, 2)
    smear = rest[2 * count]
    backout = rest[-1]
    e = p["embed.weight"][x]
    width = p["smear_gate"].shape[1]
    rows = [e[0]]
    for t in range(1, T):
        rows.append(e[t] + smear * torch.sigmoid(p["smear_gate"][0] @ e[t][:width]) * e[t - 1])
    h = h0 = rms(torch.stack(rows)) + added
    begins = [t == 0 or v == bos for t, v in enumerate(x)]
    if longest:
        begin = 0
        for t in range(T):
            begin = t if begins[t] else begin
            begins[t] |= (t - begin) % longest == 0
    document = torch.tensor(begins).cumsum(0)
    outputs = {}
    tables = {}
    for i, word in enumerate(layers):
        word, _, skip = word.partition("+")
        is_last = late and i == count - 1
        has_attention = bool({*word} & {*"SLP"})
        if i in gates_from:
            queue = list(
                token_weights(p, f"token_gates.{gates_from.index(i)}", h, p["gate_scale"]).T
            )

        def gates(n, present):
            return [queue.pop(0)[:, None] for _ in range(n)] if late and present else []

        (add_h0,), (add_ngrams,) = (gates(1, letter in word) or [0] for letter in "in")
        skip_gate = gates(1, skip)
        xsa_gates, head_gates, reads, writes = (gates(heads, letter in word) for letter in "xgdd")
        if i == 0:
            if late:
                h = h + add_ngrams * ngrams
                add_ngrams = 0
            outputs[-1] = h
        if skip:
            h = (
                h
                + torch.sigmoid(skips.pop(0))
                * (skip_gate[0] if skip_gate else 1)
                * outputs[int(skip)]
            )
        if word == "-":
            outputs[i] = h
            continue
        added_values = 0
        first = h0
        if is_last:
            of_token = list(token_weights(p, "mudd.layer", h)[..., None].unbind(1))
            sources = (outputs[-1], outputs[backout_layer], h)
            first = outputs[-1]
            added_values = sum(of_token[j] * sources[j] for j in range(3)).view(T, heads, D)
            h = h + sum(of_token[3 + j] * sources[j] for j in range(3))
            resid_attn, resid_mlp, post_attn, post_mlp, add_h0, add_ngrams = of_token[6:12]
        elif late:
            resid_attn, resid_mlp = p["resid_lambdas"][i]
            post_attn, post_mlp = p["post_lambdas"][i]
        else:
            h = lam[i, 0] * h + lam[i, 1] * h0
        if has_attention:
            width = D // 2 if "q" in word else D
            v_width = D // 2 if "v" in word else D
            its_scale, its_freqs = (
                (narrow_scale, freqs[: D // 4]) if "q" in word else (scale, freqs)
            )
            a = rms(outputs[backout_layer] if "c" in word else h)
            names = ("qk", "vo") if late else ("qkvo",)
            w = torch.cat([p[f"blocks.{i}.attn.{name}"].reshape(-1, dim, dim) for name in names])
            q, k, v = ((a @ w[j].T).view(T, heads, D) for j in range(3))
            q = rms(q[..., :width])
            k = rms(k[..., :width])
            if "P" in word:  # head h of token t has position 2t + h % 2
                q, k = (
                    torch.stack(
                        [
                            rotary(part.repeat_interleave(2, 0), its_freqs)[h % 2 :: 2, h]
                            for h in range(heads)
                        ],
                        1,
                    )
                    for part in (q, k)
                )
            else:
                q = rotary(q, its_freqs)
                k = rotary(k, its_freqs)
            if late and "L" in word:
                shift_by = [int(freq == 0) for freq in freqs.tolist()] * 2
                k = torch.stack(
                    [
                        torch.stack([k[max(0, t - shift_by[d]), :, d] for d in range(D)], -1)
                        for t in range(T)
                    ]
                )
            v = sa[i, 0] * v + added_values
            if number := [c for c in word if c.isdigit()]:
                values = tables[number[0]] = p[f"value_embeds.{number[0]}.weight"][x]
                value_gate = sa[i, 1].expand(T, heads)
                if is_last:
                    value_gate = torch.stack(
                        [of_token[-2 + (head >= heads // 2)][:, 0] for head in range(heads)], 1
                    )
                elif late:
                    gate = p[f"blocks.{i}.attn.value_gate"]
                    half = gate.shape[1] // 2
                    value_gate = 2 * torch.sigmoid(
                        a[:, :half] @ gate[:, :half].T
                        + values[:, : gate.shape[1] - half] @ gate[:, half:].T
                    )
                v = v + value_gate[..., None] * values.view(T, heads, D)
            v = torch.cat([v[..., :v_width], torch.zeros_like(v[..., v_width:])], -1)
            window = long if "L" in word else short
            heads_out = []
            for head in range(heads):
                mixed = []
                for t in range(T):
                    if "P" in word:
                        pair = (head, (head + heads // 2) % heads)
                        position = lambda j, h: 2 * j + (h >= heads // 2)
                    else:
                        pair = (head,)
                        position = lambda j, h: j
                    visible = [
                        (j, h)
                        for j in range(t + 1)
                        for h in pair
                        if 0 <= position(t, head) - position(j, h) <= window
                        and document[j] == document[t]
                    ]
                    weights = torch.softmax(
                        torch.stack([its_scale * (k[j, h] @ q[t, head]) for j, h in visible]), 0
                    )
                    y_t = sum(weight * v[j, h] for weight, (j, h) in zip(weights, visible))
                    if reads:
                        read = torch.stack([gate[t, 0] for gate in reads])
                        read = read / (read.square().mean() + 1e-6).sqrt()
                        seen = [
                            j
                            for j in range(max(0, t - dc_window + 1), t + 1)
                            if document[j] == document[t]
                        ]
                        shares = sum(
                            read[other]
                            * torch.softmax(
                                torch.stack(
                                    [its_scale * (k[j, other] @ q[t, other]) for j in seen]
                                ),
                                0,
                            )
                            for other in range(heads)
                        )
                        y_t = y_t + writes[head][t] * sum(
                            share * v[j, head] for j, share in zip(seen, shares)
                        )
                    if "x" in word:
                        own = v[t, head]
                        y_t = y_t - torch.tanh(xsa_gates[head][t]) * (y_t @ own) / (own @ own) * own
                    mixed.append(y_t)
                if late:
                    gate = head_gates[head] if head_gates else 1
                else:
                    weight = p[f"blocks.{i}.attn.gate"]
                    gate = torch.sigmoid(a[:, : weight.shape[1]] @ weight[head])[:, None]
                heads_out.append(torch.stack(mixed) * gate)
            out = torch.stack(heads_out, 1).reshape(T, dim) @ w[3].T
            if late:
                h = (
                    resid_attn * h
                    + post_attn * sa[i, 1] * out
                    + add_h0 * first
                    + add_ngrams * ngrams
                )
            else:
                h = h + out
        elif "r" in word:
            h = resid_attn * h + add_h0 * first + add_ngrams * ngrams
        if "M" in word:
            read = rms(h)
            out = sum(
                torch.relu(read @ p[f"blocks.{i}.{name}.fc"]).square()
                @ p[f"blocks.{i}.{name}.proj"].T
                for name in ("mlp", "second_mlp")[: word.count("M")]
            )
            h = resid_mlp * h + post_mlp * out if late else h + out
        elif "r" in word:
            h = resid_mlp * h
        outputs[i] = h
    if late:
        saved = sorted(
            {-1, backout_layer, count - 2}
            | {int(word.split("+")[1]) for word in layers if "+" in word}
        )
        sources = [outputs[i] for i in saved]
        weights = token_weights(p, "mudd.head", h)[..., None].expand(T, -1, dim)
        if "mudd.by_group" in p:  # one more weight for the channels of each group
            u = h @ p["mudd.head.hidden"].T
            u = u * (1 + torch.erf(u / math.sqrt(2))) / 2
            more = torch.einsum("kgw,tw->tkg", p["mudd.by_group"], u) * 0.1
            weights = weights + more.repeat_interleave(dim // more.shape[2], 2)
            sources += [
                *(tables[name] for name in sorted(tables)),
                read,
                rms(outputs[backout_layer]),
            ]
        else:
            sources += [tables["0"]]
        h = rms(
            h
            + sum(
                weight * source for weight, source in zip(weights.unbind(1), sources, strict=True)
            )
        )
    else:
        h = rms(h - backout * outputs[backout_layer])
    cap, shift, softness = softcap
    logits = cap * torch.sigmoid((h @ p["lm_head.weight"].T + shift) / softness)
    logs = logits.log_softmax(-1)
    objective = -sum(
        weight * logs[t, y[t + k]] for k, weight in enumerate(ahead) for t in range(T - k)
    )
    if prefix_weight:
        objective = objective - prefix_weight * sum(
            logs[t, prefixes[y[t]]] for t in range(T) if prefixes[y[t]] >= 0
        )
    return objective


def polar(u):
    """Approximate the orthogonal polar factor of a matrix by five Polar Express iterations."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / (1.02 * x.norm() + 1e-6)
    for a, b, c in COEFFICIENTS:
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if u.shape[0] > u.shape[1] else x


class NorMuon:
    """NorMuon for one parameter, split into `parts` matrices of `shape`. by_column: second moments
    per column (default: by shape)."""

    def __init__(self, p, parts=1, k=1.0, shape=None, by_column=None):
        rows, columns = p.shape
        self.p = p
        self.parts = parts
        self.k = k
        self.shape = shape or (rows, columns // parts)
        self.shape_scale = math.sqrt(
            max(1, self.shape[0] / self.shape[1] if shape else rows / columns)
        )
        self.by_column = columns > rows if by_column is None else by_column
        self.m = torch.zeros_like(p)
        self.v = {}

    def step(self, g, lr=0.03, f=1.0, momentum=0.95, beta2=0.95, decay=1.2):
        self.m = momentum * self.m + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * self.m
        new = self.p.clone()
        for i, (up, pp, out) in enumerate(
            zip(*(x.reshape(self.parts, *self.shape) for x in (u, self.p, new)))
        ):
            o = polar(up)
            size = o.norm()
            mean = o.square().mean(0 if self.by_column else 1, keepdim=True)
            self.v[i] = beta2 * self.v.get(i, torch.zeros_like(mean)) + (1 - beta2) * mean
            o = o / self.v[i].clamp_min(1e-10).sqrt()
            o = o * size / o.norm().clamp_min(1e-10)
            o = o + (o * pp >= 0) * (decay * lr * f * pp)
            out.copy_(pp - lr * f * self.shape_scale * self.k * o)
        self.p = new


class Adam:
    """Adam for one parameter. The record adds eps before it corrects the second moment's bias."""

    def __init__(self, p):
        self.p = p
        self.m = torch.zeros_like(p)
        self.v = torch.zeros_like(p)
        self.t = 0

    def step(self, g, lr, beta1=0.65, beta2=0.95, eps=1e-8):
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        size = lr * math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        self.p = self.p - size * self.m / (self.v.sqrt() + eps)
