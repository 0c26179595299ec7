"""The Transformer again, in float64 with NumPy: one row, one head, and in delta layers one token at a time."""

import numpy as np

from tests.models.common import paths


def np_softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def np_forward(m, params, tokens, segments):
  """Logits of one row, in float64, one head at a time; `m` is the config."""
  p = {k: np.asarray(v, np.float64) for k, v in paths(params).items()}
  D, H, G = m.hidden_size, m.num_heads, m.num_kv_heads or m.num_heads
  latent = m.latent if m.latent.kv_rank else None
  K = latent.rope_dim if latent else m.head_dim or D // H
  n = len(tokens)
  positions = np.array([t - segments.tolist().index(segments[t]) for t in range(n)])

  def norm(x, name, kind=m.norm, layer=...):
    x = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps)
    scale = p[name + "/scale"][layer] + m.norm_scale_plus_one
    return x * scale + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def dense(x, name, layer):
    return x @ p[name + "/kernel"][layer] + (p[name + "/bias"][layer] if name + "/bias" in p else 0)

  def rope(x, theta):
    P = int(K * m.rope_fraction) // 2
    if m.rope_interleaved:
      pairs = (x[:, 0 : 2 * P : 2] + 1j * x[:, 1 : 2 * P : 2]) * np.exp(
          1j * positions[:, None] * theta ** (-np.arange(P) / P))
      return np.concatenate([np.stack([pairs.real, pairs.imag], -1).reshape(n, 2 * P), x[:, 2 * P :]], 1)
    turned = (x[:, :P] + 1j * x[:, P : 2 * P]) * np.exp(1j * positions[:, None] * theta ** (-np.arange(P) / P))
    return np.concatenate([turned.real, turned.imag, x[:, 2 * P :]], 1)

  types = [m.layer_pattern[layer % len(m.layer_pattern)] for layer in range(m.num_layers)]

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  def gated_delta_net(x, layer):
    """Token by token: the state fades, what it says of the key is corrected, the query reads it."""
    d, layer = m.delta, types[:layer].count("delta")

    def convolved(name):
      y, taps = dense(x, f"blocks/delta/{name}", layer), p[f"blocks/delta/{name}_conv/taps"][layer]
      y = np.array([sum(taps[d.conv_width - 1 - t + s] * y[s] for s in range(max(0, t - d.conv_width + 1), t + 1)
                        if segments[s] == segments[t]) for t in range(n)])
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

  def latent_attention(x, layer):
    """Keys and values are expanded, head by head; eps of the latents' norms is 1e-6."""
    def down(name):
      y = dense(x, f"blocks/attn/{name}_down", layer)
      y, rest = np.split(y, [p[f"blocks/attn/{name}_down_norm/scale"].shape[-1]], axis=-1)
      y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[f"blocks/attn/{name}_down_norm/scale"][layer]
      return dense(y, f"blocks/attn/{name}_up", layer).reshape(n, H, -1), rest

    (q, _), (kv, k_rope) = down("q"), down("kv")
    seen = np.tril(segments[:, None] == segments)
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
    kind, layer = types[layer], layer - types[:layer].count("delta")
    local, rotates = kind == "local", kind != "nope" and m.positions == "rope"
    q, k, v = (dense(x, f"blocks/attn/{c}", layer) for c in "qkv")
    q, gate = np.split(q.reshape(n, H, 2 * K), 2, axis=-1) if m.attention_gate else (q, np.inf)
    q, k, v = (c.reshape(n, -1, K) for c in (q, k, v))
    if m.qk_norm:
      over = (n, -1) if m.qk_norm_over == "all" else (n, -1, K)
      kind = m.norm if m.qk_norm_over == "each_head" else "rmsnorm"
      q, k = (norm(c.reshape(over), f"blocks/attn/{name}_norm", kind, layer).reshape(c.shape)
              for c, name in ((q, "q"), (k, "k")))
    behind = np.arange(n)[:, None] - np.arange(n)
    seen = (behind >= 0) & (segments[:, None] == segments) & (behind < (m.window if local else n))
    heads = []
    for h in range(H):
      q_h, k_h = q[:, h], k[:, h // (H // G)]
      if rotates:
        theta = m.rope_local_theta if local and m.rope_local_theta else m.rope_theta
        q_h, k_h = rope(q_h, theta), rope(k_h, theta)
      scores = q_h @ k_h.T * (m.attention_scale or K**-0.5)
      if m.attention_logit_cap:
        scores = m.attention_logit_cap * np.tanh(scores / m.attention_logit_cap)
      scores = np.where(seen, scores, -np.inf)
      if m.attention_sinks:  # a key that all see, without a value
        scores = np.concatenate([scores, np.full((n, 1), p["blocks/attn/sinks"][layer, h])], axis=1)
      heads.append(np_softmax(scores)[:, :n] @ v[:, h // (H // G)])
    out = np.stack(heads, 1) * sigmoid(gate)
    return dense(out.reshape(n, -1), "blocks/attn/o", layer)

  def mlp(x, layer):
    act = {
        "swiglu": lambda x: x / (1 + np.exp(-x)),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
    }.get(m.activation, lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    up = dense(x, "blocks/mlp/up", layer)
    if m.activation == "clamped_swiglu":
      gate = np.minimum(dense(x, "blocks/mlp/gate", layer), 7)
      return dense((np.clip(up, -7, 7) + 1) * gate * sigmoid(1.702 * gate), "blocks/mlp/down", layer)
    gated = m.activation.endswith("glu")
    return dense(act(dense(x, "blocks/mlp/gate", layer)) * up if gated else act(up), "blocks/mlp/down", layer)

  x = p["embed/embedding"][tokens] * (D**0.5 if m.scale_embeddings else 1) * m.embedding_scale
  if m.positions == "learned":
    x = x + p["pos_embed/embedding"][positions]
  for layer in range(m.num_layers):
    if m.parallel_blocks:
      y = norm(x, "blocks/attn_norm", layer=layer)
      x = x + m.residual_scale * (self_attention(y, layer) + mlp(y, layer))
      continue
    for branch, name in ((self_attention, "attn"), (mlp, "mlp")):
      y = norm(x, f"blocks/{name}_norm", layer=layer) if m.norm_position != "post" else x
      y = branch(y, layer)
      y = norm(y, f"blocks/{name}_post_norm", layer=layer) if m.norm_position != "pre" else y
      x = x + m.residual_scale * y
  x = m.logit_scale * norm(x, "final_norm")
  logits = x @ (p["embed/embedding"].T if m.tie_embeddings else p["unembed/kernel"])
  return m.final_logit_cap * np.tanh(logits / m.final_logit_cap) if m.final_logit_cap else logits
