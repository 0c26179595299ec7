"""The Transformer again, in float64 with NumPy: one row, one head, where layers have a state one token."""

import numpy as np
import scipy.stats

from tests.models.common import paths


def np_softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def np_forward(m, params, tokens, segments):
  """Logits of one row, in float64, one head at a time; `m` is the config."""
  p = {k: np.asarray(v, np.float64) for k, v in paths(params).items()}
  D, H = m.hidden_size, m.num_heads
  latent = m.latent if m.latent.kv_rank else None
  K = H_K = latent.rope_dim if latent else m.head_dim or D // H
  n = len(tokens)
  positions = np.array([t - segments.tolist().index(segments[t]) for t in range(n)])

  def norm(x, name, kind=m.norm, layer=...):
    x = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps)
    scale = p[name + "/scale"][layer] + m.norm_scale_plus_one
    return x * scale + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def dense(x, name, layer):
    return x @ p[name + "/kernel"][layer] + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def rope(x, theta, turning=None, interleaved=m.rope_interleaved):
    P = int(K * m.rope_fraction) // 2 if turning is None else x.shape[1] // 2
    if interleaved:
      pairs = (x[:, 0 : 2 * P : 2] + 1j * x[:, 1 : 2 * P : 2]) * np.exp(
          1j * positions[:, None] * theta ** (-np.arange(P) / P))
      return np.concatenate([np.stack([pairs.real, pairs.imag], -1).reshape(n, 2 * P), x[:, 2 * P :]], 1)
    frequencies = theta ** (-np.arange(P) / P) * (np.arange(P) < (P if turning is None else turning))
    turned = (x[:, :P] + 1j * x[:, P : 2 * P]) * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([turned.real, turned.imag, x[:, 2 * P :]], 1)

  types = [m.layer_pattern[layer % len(m.layer_pattern)] for layer in range(m.num_layers)]
  own_kv, lent = m.num_layers - m.kv_shared_layers, {}
  own_form = "" if m.global_attention.head_dim is None else "global_"
  mixers = [kind if kind in ("delta", "mamba", "mlp") else
            own_form * (kind == "global") + "query_" * (i >= own_kv) + "attn"
            for i, kind in enumerate(types)]

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  def gated_delta_net(x, layer):
    """Token by token: the state fades, what it says of the key is corrected, the query reads it."""
    d, layer = m.delta, types[:layer].count("delta")

    def convolved(name):
      y = convolution(dense(x, f"blocks/delta/{name}", layer), f"blocks/delta/{name}_conv", layer, d.conv_width)
      return y * sigmoid(y)

    q, k, v = (convolved(name).reshape(n, heads, -1) for name, heads in (
        ("q", d.num_key_heads), ("k", d.num_key_heads), ("v", d.num_value_heads)))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = sigmoid(dense(x, "blocks/delta/b", layer))
    rate = np.exp(p["blocks/delta/A_log"][layer])
    keep = np.exp(-rate * np.log1p(np.exp(dense(x, "blocks/delta/a", layer) + p["blocks/delta/dt_bias"][layer])))
    z, heads = dense(x, "blocks/delta/z", layer).reshape(v.shape), []
    for h in range(d.num_value_heads):
      g, out, state = h // (d.num_value_heads // d.num_key_heads), [], 0
      for t in range(n):
        state = keep[t, h] * state * (t > 0 and segments[t] == segments[t - 1]) + np.zeros((q.shape[-1], v.shape[-1]))
        state = state + beta[t, h] * np.outer(k[t, g], v[t, h] - k[t, g] @ state)
        out.append(q[t, g] @ state / np.sqrt(d.key_head_dim))
      out = np.array(out)
      out = out / np.sqrt((out**2).mean(-1, keepdims=True) + m.norm_eps) * p["blocks/delta/norm/scale"][layer]
      heads.append(out * z[:, h] * sigmoid(z[:, h]))
    return dense(np.concatenate(heads, 1), "blocks/delta/o", layer)

  def convolution(x, name, layer, width):
    taps = p[name + "/taps"][layer]
    y = np.array([sum(taps[width - 1 - t + s] * x[s] for s in range(max(0, t - width + 1), t + 1)
                      if segments[s] == segments[t]) for t in range(n)])
    return y + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def mamba(u, layer):
    """Token by token: the state fades by the step, takes the input up, and is read."""
    s, layer = m.mamba, types[:layer].count("mamba")
    x, b, c = (convolution(dense(u, f"blocks/mamba/{name}", layer), f"blocks/mamba/{name}_conv", layer, s.conv_width)
               for name in "xbc")
    x, b, c = (y * sigmoid(y) for y in (x, b, c))
    dt = np.log1p(np.exp(dense(u, "blocks/mamba/dt", layer) + p["blocks/mamba/dt_bias"][layer]))
    dt = np.maximum(dt, s.min_step)
    keep, heads = np.exp(-np.exp(p["blocks/mamba/A_log"][layer]) * dt), []
    for h in range(s.num_heads):
      group = h * s.num_groups // s.num_heads
      of_group = slice(group * s.state_dim, (group + 1) * s.state_dim)
      x_h, out, state = x[:, h * s.head_dim:(h + 1) * s.head_dim], [], 0
      for t in range(n):
        state = keep[t, h] * state * (t > 0 and segments[t] == segments[t - 1])
        state = state + np.outer(b[t, of_group], dt[t, h] * x_h[t])
        out.append(c[t, of_group] @ state + p["blocks/mamba/D"][layer, h] * x_h[t])
      heads.append(np.array(out))
    z = dense(u, "blocks/mamba/z", layer)
    y = (np.concatenate(heads, 1) * z * sigmoid(z)).reshape(n, s.num_groups, -1)
    y = (y / np.sqrt((y**2).mean(-1, keepdims=True) + m.norm_eps)).reshape(n, -1)
    return dense(y * p["blocks/mamba/norm/scale"][layer], "blocks/mamba/o", layer)

  choices = []

  def chosen(x, layer, seen):
    """Which keys the layer's indexer, or that of the last layer with one, chooses; of ties the earliest."""
    shared = [i in latent.index_shared_layers for i in range(layer + 1)]
    if shared[layer]:
      return choices[-1]
    own, name = shared.count(False) - 1, "blocks/indexer"
    asking = dense(x, "blocks/attn/q_down", layer)
    asking = asking / np.sqrt((asking**2).mean(-1, keepdims=True) + 1e-6) * p["blocks/attn/q_down_norm/scale"][layer]
    k = dense(x, f"{name}/keys", own)
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = rope(k * p[f"{name}/keys_norm/scale"][own] + p[f"{name}/keys_norm/bias"][own], m.rope_theta,
             interleaved=latent.index_rope_interleaved)
    q = dense(asking, f"{name}/queries", own).reshape(n, latent.index_heads, -1)
    weights, scores = dense(x, f"{name}/weights", own), 0
    for h in range(latent.index_heads):
      turned = rope(q[:, h], m.rope_theta, interleaved=latent.index_rope_interleaved)
      scores = scores + weights[:, h, None] * np.maximum(turned @ k.T, 0)
    best = [sorted(np.flatnonzero(seen[t]), key=lambda s, t=t: (-scores[t, s], s)) for t in range(n)]
    choices.append(np.array([np.isin(np.arange(n), of_query[:latent.index_topk]) for of_query in best]))
    return choices[-1]

  def latent_attention(x, layer):
    """Keys and values are expanded, head by head; eps of the latents' norms is 1e-6."""
    def down(name):
      y = dense(x, f"blocks/attn/{name}_down", layer)
      y, rest = np.split(y, [p[f"blocks/attn/{name}_down_norm/scale"].shape[-1]], axis=-1)
      y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[f"blocks/attn/{name}_down_norm/scale"][layer]
      return dense(y, f"blocks/attn/{name}_up", layer).reshape(n, H, -1), rest

    (q, _), (kv, k_rope) = down("q"), down("kv")
    seen = np.tril(segments[:, None] == segments)
    if latent.index_topk:
      seen &= chosen(x, layer, seen)
    heads = []
    for h in range(H):
      nope = q[:, h, :latent.nope_dim] @ kv[:, h, :latent.nope_dim].T
      rotated = rope(q[:, h, latent.nope_dim:], m.rope_theta) @ rope(k_rope, m.rope_theta).T
      weights = np_softmax(np.where(seen, (nope + rotated) * m.attention_scale, -np.inf))
      heads.append(weights @ kv[:, h, latent.nope_dim:])
    return dense(np.concatenate(heads, 1), "blocks/attn/o", layer)

  def self_attention(x, layer):
    if latent:
      return latent_attention(x, layer)
    if types[layer] == "delta":
      return gated_delta_net(x, layer)
    if types[layer] == "mamba":
      return mamba(x, layer)
    kind, own = types[layer], m.global_attention if types[layer] == "global" else None
    K, turning, attn = H_K, None, f"blocks/{mixers[layer]}"
    if own is not None and own.head_dim:
      K, turning = own.head_dim, int(own.rope_fraction * own.head_dim) // 2
    shared, layer = layer >= own_kv, mixers[:layer].count(mixers[layer])
    local, rotates = kind == "local", kind != "nope" and m.positions == "rope"
    scaled = m.qk_norm and m.qk_norm_over != "unscaled"

    def of_heads(y, name):
      over = (n, -1) if m.qk_norm_over == "all" else (n, -1, K)
      of = m.norm if m.qk_norm_over == "each_head" else "rmsnorm"
      y = y.reshape(n, -1, K)
      return norm(y.reshape(over), f"{attn}/{name}_norm", of, layer).reshape(y.shape) if scaled else y

    q = dense(x, f"{attn}/q", layer)
    q, gate = np.split(q.reshape(n, H, 2 * K), 2, axis=-1) if m.attention_gate else (q, np.inf)
    q = of_heads(q, "q")
    if not shared:
      k = dense(x, f"{attn}/k", layer)
      v = (dense(x, f"{attn}/v", layer) if f"{attn}/v/kernel" in p else k).reshape(n, -1, K)
      if m.value_norm:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + m.norm_eps)
      lent[kind] = of_heads(k, "k"), v
    k, v = lent[kind]
    G = k.shape[1]
    behind = np.arange(n)[:, None] - np.arange(n)
    seen = (behind >= 0) & (segments[:, None] == segments) & (behind < (m.window if local else n))
    if kind == "chunked":
      seen &= positions[:, None] // m.attention_chunk == positions // m.attention_chunk
    heads = []
    for h in range(H):
      q_h, k_h = q[:, h], k[:, h // (H // G)]
      if rotates:
        theta = m.rope_local_theta if local and m.rope_local_theta else m.rope_theta
        q_h, k_h = rope(q_h, theta, turning), rope(k_h, theta, turning)
        if m.qk_norm_over == "unscaled":
          q_h, k_h = (y / np.sqrt((y**2).mean(-1, keepdims=True) + m.norm_eps) for y in (q_h, k_h))
      elif kind == "nope":
        tuning = m.nope_temperature
        q_h = q_h * (1 + tuning.scale * np.log(1 + np.floor((positions[:, None] + 1) / tuning.floor)))
      scores = q_h @ k_h.T * (m.attention_scale or K**-0.5)
      if m.attention_logit_cap:
        scores = m.attention_logit_cap * np.tanh(scores / m.attention_logit_cap)
      scores = np.where(seen, scores, -np.inf)
      if m.attention_sinks:  # a key that all see, without a value
        scores = np.concatenate([scores, np.full((n, 1), p[f"{attn}/sinks"][layer, h])], axis=1)
      heads.append(np_softmax(scores)[:, :n] @ v[:, h // (H // G)])
    out = np.stack(heads, 1) * sigmoid(gate)
    return dense(out.reshape(n, -1), f"{attn}/o", layer)

  def mlp(x, layer):
    name, depth = "blocks/mlp", layer
    if m.double_wide_mlp and layer >= own_kv:
      name, layer = "blocks/wide_mlp", layer - own_kv
    act = {
        "swiglu": lambda x: x / (1 + np.exp(-x)),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
    }.get(m.activation, lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    up = dense(x, f"{name}/up", layer)
    if m.activation == "clamped_swiglu":
      gate = np.minimum(dense(x, f"{name}/gate", layer), 7)
      return dense((np.clip(up, -7, 7) + 1) * gate * sigmoid(1.702 * gate), f"{name}/down", layer)
    if not m.activation.endswith("glu"):
      return dense(act(up), f"{name}/down", layer)
    gate = dense(x, f"{name}/gate", layer)
    if m.activation_sparsity and m.activation_sparsity[depth]:
      cutoff = gate.mean(-1) + gate.std(-1) * scipy.stats.norm.ppf(m.activation_sparsity[depth])
      gate = np.maximum(gate - cutoff[:, None], 0)
    return dense(act(gate) * up, f"{name}/down", layer)

  def per_layer(x, layer):
    gate = dense(x, "blocks/per_layer/gate", layer)
    gated = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * own[:, layer]
    return norm(dense(gated, "blocks/per_layer/out", layer), "blocks/per_layer/norm", layer=layer)

  def coefficients(x, name, layer):
    routed = np.tanh(norm(x, "blocks/altup/norm", layer=layer) / D @ p["blocks/altup/router/kernel"][layer])
    return routed @ p[f"blocks/altup/{name}"][layer].clip(-m.altup.coef_clip, m.altup.coef_clip)

  def projected(x, name, like):
    x = x @ p[f"streams/{name}/kernel"]
    return x * np.sqrt((like**2).mean(-1, keepdims=True) / np.maximum((x**2).mean(-1, keepdims=True), 1e-5))

  x = p["embed/embedding"][tokens] * (D**0.5 if m.scale_embeddings else 1) * m.embedding_scale
  if m.per_layer_size:
    shape = (n, m.num_layers, m.per_layer_size)
    made = norm((x @ p["per_layer_proj/kernel"] / np.sqrt(D)).reshape(shape), "per_layer_norm")
    known = np.where(tokens < (m.per_layer_vocab or len(p["embed/embedding"])), tokens, 0)
    own = (made + p["per_layer_embed/embedding"][known].reshape(shape) * np.sqrt(m.per_layer_size)) / np.sqrt(2)
  if m.positions == "learned":
    x = x + p["pos_embed/embedding"][positions]
  N = m.altup.num_inputs
  streams = np.concatenate([x[None], projected(np.stack([x] * (N - 1)), "split", x)]) if N else None
  for layer in range(m.num_layers):
    if N:
      mixing = coefficients(streams[0], "prediction", layer).reshape(n, N, N)
      streams = streams + np.einsum("tij,jtd->itd", mixing, streams)
      x = streams[0]
    if m.parallel_blocks:
      y = norm(x, "blocks/attn_norm", layer=layer)
      x = x + m.residual_scale * (self_attention(y, layer) + mlp(y, layer))
      continue
    if "mlp" in types:  # one branch a layer
      y = norm(x, "blocks/attn_norm", layer=layer)
      y = mlp(y, types[:layer].count("mlp")) if types[layer] == "mlp" else self_attention(y, layer)
      x = x + m.residual_scale * y
      continue
    for branch, name in ((self_attention, "attn"), (mlp, "mlp")):
      before = y = norm(x, f"blocks/{name}_norm", layer=layer) if m.norm_position != "post" else x
      y = branch(y, layer)
      y = norm(y, f"blocks/{name}_post_norm", layer=layer) if m.norm_position != "pre" else y
      x = x + m.residual_scale * y
      if m.laurel_rank and name == "attn":
        low = dense(dense(before, "blocks/laurel/left", layer), "blocks/laurel/right", layer)
        x = (x + before + norm(low, "blocks/laurel/norm", layer=layer)) / np.sqrt(2)
    if N:
      corrections = 1 + coefficients(x, "correction", layer)
      streams = streams + corrections.T[:, :, None] * (x - streams[0])
      streams[1:] += per_layer(streams[0] * p["blocks/altup/scale"][layer], layer)
    elif m.per_layer_size:
      x = x + m.residual_scale * per_layer(x, layer)
    x = x * (p["blocks/layer_scale"][layer] if m.layer_scale else 1)
  if N:
    x = (streams[0] + projected(streams[1:], "join", streams[0]).sum(0)) / N
  x = m.logit_scale * norm(x, "final_norm")
  logits = x @ (p["embed/embedding"].T if m.tie_embeddings else p["unembed/kernel"])
  return m.final_logit_cap * np.tanh(logits / m.final_logit_cap) if m.final_logit_cap else logits
