"""The model's keys, with their defaults and meanings: the section `model` of a config (trainer/config/keys.py)."""

from ml_collections import ConfigDict, config_dict

unset = config_dict.placeholder


def model() -> ConfigDict:
  """One Transformer whose keys span Llama, Qwen, Mistral, Mixtral, Gemma and GPT-2."""
  m = ConfigDict()
  # transformer, or the dotted path of a class of yours (docs/extending.md).
  m.name = "transformer"
  # The folder of a Hugging Face checkpoint: the keys that describe the architecture then have the values of its
  # config.json (those changed here win, and are shown), and the parameters are its own (see init_from).
  m.hf = unset(str)
  # Entries of its config.json that are not known here and change nothing of what the model computes, e.g.
  # --config.model.hf_ignore=my_rate,text_config.my_number. Names and strings need no such word.
  # vision_config, of a Qwen3.5: its tower is left out, and the text model alone is trained and exported.
  m.hf_ignore = ()
  # Default: the tokenizer's size rounded up to a multiple of `vocab_multiple`.
  m.vocab_size = unset(int)
  m.vocab_multiple = 128
  # Layers, and the width of the residual stream between them.
  m.num_layers = 4
  m.hidden_size = 128
  # Width of the MLP's hidden layer.
  m.intermediate_size = 512
  # Query heads.
  m.num_heads = 4
  # Key/value heads; fewer than num_heads: grouped-query attention. Default: num_heads.
  m.num_kv_heads = unset(int)
  # Default: hidden_size / num_heads.
  m.head_dim = unset(int)
  # rmsnorm | layernorm; `norm_eps` is added to the variance.
  m.norm = "rmsnorm"
  m.norm_eps = 1e-6
  # Scales are stored as offsets from one (Gemma).
  m.norm_scale_plus_one = False
  m.norm_bias = False
  # pre: before attention and MLP. post: after them (OLMo 2). sandwich: both (Gemma 2 and 3).
  m.norm_position = "pre"
  # Attention and MLP read the same input, after one norm, and are added together (Cohere).
  m.parallel_blocks = False
  # gated: swiglu | geglu (tanh GELU) | geglu_exact | clamped_swiglu (gpt-oss: gate and up at most 7 in size, sigmoid of
  # 1.702 times the gate, up plus 1); plain: gelu (tanh) | gelu_exact | quick_gelu | relu | relu2 | silu | xielu
  # (arXiv 2411.13010; Apertus), which has two numbers a layer that are learned
  m.activation = "swiglu"
  # rope | learned (needs `max_positions`) | none
  m.positions = "rope"
  m.max_positions = unset(int)
  m.rope_theta = 10_000.0
  # Base frequency of sliding-window layers where it differs (Gemma 3).
  m.rope_local_theta = unset(float)
  # Share of each head that is rotated.
  m.rope_fraction = 1.0
  # How many pairs turn by a token's time, how many by its row and by its column in an image, in this order (M-RoPE,
  # Qwen2-VL); texts have one position for all three. For the towers of Qwen; (): one position for all.
  m.rope_sections = ()
  # The three take turns from the first pair on, as long as those of rows and columns last (Qwen3-VL, Qwen3.5), and do
  # not stand one after the other.
  m.rope_sections_interleaved = False
  # The pairs that turn together are neighbours (GLM, Cohere), and not as far apart as there are pairs.
  m.rope_interleaved = False
  # Longer contexts than the model was trained on; not for local layers that have a base of their own.
  # none | linear | dynamic | llama3 | yarn | longrope; `factor`: how many times longer.
  m.rope_scaling = r = ConfigDict(dict(type="none", factor=1.0))
  # Length before scaling; needed by all but linear.
  r.original_positions = unset(int)
  # llama3: wavelengths above original_positions / low are scaled, those below original_positions / high not.
  r.low_frequency_factor = 1.0
  r.high_frequency_factor = 4.0
  # yarn: rotations within the original length between which scaling fades in, and whether the dimensions where
  # that happens are rounded to whole ones; factor on cosines and sines (longrope, too), default 0.1 ln(factor) + 1, of
  # longrope sqrt(1 + ln(factor) / ln(original_positions)).
  r.beta_fast = 32.0
  r.beta_slow = 1.0
  r.truncate = True
  r.attention_factor = unset(float)
  # longrope: what each pair's frequency is divided by, in texts of up to original_positions tokens and in longer ones.
  r.short_factors = ()
  r.long_factors = ()
  # The unembedding is the embedding, transposed.
  m.tie_embeddings = True
  # What hidden states become: lm: logits of the next token; score: `num_labels` scores of each sequence, of its last
  # token (a reward model, a classifier; *ForSequenceClassification), fresh where the checkpoint of a language model has
  # none; embedding: nothing else, they are pooled into an embedding of each text (strategy contrastive; *Model).
  m.head = "lm"
  m.num_labels = 1
  # embedding: what is learned of the similarity of two texts besides them: fixed: nothing; scale: its (inverse)
  # temperature; scale_bias: a bias, too. Default: that of strategy.loss.
  m.similarity = unset(str)
  # Multiply embeddings by sqrt(hidden_size) (Gemma).
  m.scale_embeddings = False
  # Factors on embeddings, on what attention and MLP add to the residual stream, and on logits, before their cap
  # (Granite, Cohere).
  m.embedding_scale = 1.0
  m.residual_scale = 1.0
  m.logit_scale = 1.0
  # Biases of the query/key/value projections, the attention output and the MLP, each expert's included.
  m.qkv_bias = False
  m.attention_out_bias = False
  m.mlp_bias = False
  # What a layer gives is multiplied by a number of its own, which a checkpoint says and which is not trained (Gemma 4).
  m.layer_scale = False
  # Normalise queries and keys (Qwen 3, Gemma 3); `qk_norm_over` says over what.
  m.qk_norm = False
  # head: RMSNorm of each head, with one scale for all of them. all: RMSNorm of all heads together (OLMo 2).
  # each_head: each head by the kind that `norm` says, with a scale of its own (Cohere). unscaled: RMSNorm of each head
  # after its rotation, without a scale, in layers that rotate (Llama 4). rotated: as head, but after the rotation
  # (Hunyuan).
  m.qk_norm_over = "head"
  # RMSNorm of each head's values, without a scale (Gemma 4).
  m.value_norm = False
  # Scores are multiplied by this. Default: head_dim ** -0.5.
  m.attention_scale = unset(float)
  # cap * tanh(x / cap) on attention scores and on logits (Gemma 2); unset: none.
  m.attention_logit_cap = unset(float)
  m.final_logit_cap = unset(float)
  # What attention gives is multiplied by the sigmoid of as many numbers, which the query projection makes, too: of each
  # head its query, then its gate (Qwen3-Next).
  m.attention_gate = False
  # Of each head one number joins the scores in the softmax's denominator, and no key or value goes with it (gpt-oss).
  m.attention_sinks = False
  # Tokens visible to a `local` layer, itself included; `layer_pattern` is repeated over the depth,
  # e.g. ("local",) for Mistral, ("local", "global") for Gemma 2. A `nope` layer sees all before it and rotates nothing:
  # ("global", "global", "global", "nope") for SmolLM 3. Where some are `mlp`, or `moe` (experts), which mix no tokens,
  # each layer is one residual branch, and the others have no MLP (Nemotron-H). A `chunked` layer sees what is before it
  # in its own chunk of attention_chunk tokens; chunks count from the start of each text (Llama 4).
  m.window = unset(int)
  m.attention_chunk = unset(int)
  m.layer_pattern = ("global",)
  # Queries of `nope` layers are multiplied by 1 + scale * ln(1 + floor((position + 1) / floor)) (Llama 4; Scalable
  # Softmax, arXiv 2501.19399); scale 0: by nothing.
  m.nope_temperature = ConfigDict(dict(scale=0.0, floor=8192))
  # Queries are multiplied, after their rotation, by 1 + scale * ln(1 + floor(position / floor)) (Ministral 3); scale 0:
  # by nothing.
  m.query_temperature = ConfigDict(dict(scale=0.0, floor=8192))
  # Layers of type global that are of another form than the others (Gemma 4), if head_dim is set: the size of a head,
  # and how many of them keys and values have (default: num_kv_heads). Values are the keys before their norm and
  # rotation, with no projection of their own. Of a head's pairs, which are those of a whole head, the share
  # rope_fraction with the highest frequencies turns (p-RoPE, arXiv 2410.06205).
  m.global_attention = g = ConfigDict(dict(values_are_keys=False, rope_fraction=1.0))
  g.head_dim = unset(int)
  g.num_kv_heads = unset(int)
  # So many of the last layers have no keys and values of their own: they use those of the last layer of their type that
  # has (Gemma 4 E2B, E4B). double_wide_mlp: their MLP is twice as wide as those of the others.
  m.kv_shared_layers = 0
  m.double_wide_mlp = False
  # Embeddings of each token for each layer, of so many numbers, which join what a projection of the usual embedding
  # gives and are added to what the layer gives, through a gate and a projection (Gemma 4 E2B, E4B); 0: none.
  m.per_layer_size = 0
  # Tokens that have such an embedding of their own; those beyond have that of token 0. Default: all.
  m.per_layer_vocab = unset(int)
  # So many streams of hidden states beside one another, of which layers compute on the first alone; before and after
  # each layer all are mixed, by coefficients that depend on the token (AltUp, arXiv 2301.13310; Gemma 3n); 0: there is
  # one, the residual stream. coef_clip: bounds the weights that coefficients are made with; unset: nothing does.
  m.altup = ConfigDict(dict(num_inputs=0, coef_clip=unset(float)))
  # Rank of a matrix that joins the residual connection around attention, whose sum with it is divided by sqrt(2)
  # (LAuReL, arXiv 2411.07501; Gemma 3n); 0: there is none.
  m.laurel_rank = 0
  # Of each layer about which share of its MLP's hidden layer is 0: gates are what they are beyond a cutoff (Spark
  # Transformer, arXiv 2506.06644; Gemma 3n), e.g. (0.95, 0.95, 0, 0); (): none in any layer.
  m.activation_sparsity = ()
  # Sizes of `delta` layers, which have a state of a fixed size in the place of keys and values (Gated DeltaNet,
  # arXiv 2412.06464; ("delta", "delta", "delta", "global") for Qwen3-Next). num_key_heads divides num_value_heads;
  # conv_width: tokens that the short convolution sees, the current one included.
  m.delta = d = ConfigDict(dict(num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=32, conv_width=4))
  # Tokens that are computed together, as products of matrices; of no effect but on speed and rounding.
  d.chunk = 64
  # Sizes of `mamba` layers, which have such a state, too (Mamba 2, arXiv 2405.21060; Granite 4, Nemotron-H): heads of
  # head_dim inputs each; num_groups, which divides num_heads: heads of a group share what their states of state_dim
  # times head_dim numbers are written and read with; conv_width: as above, and whether the convolution has a bias; no
  # step is smaller than min_step.
  m.mamba = s = ConfigDict(dict(num_heads=4, head_dim=32, num_groups=1, state_dim=32, conv_width=4, conv_bias=True,
                                min_step=0.0))
  # Tokens that are computed together; of no effect but on speed, memory and rounding.
  s.chunk = 64
  # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made of a latent of kv_rank
  # numbers, which is all that generation keeps of a token, beside its rotated key; 0: attention as usual. Queries are
  # made of one of q_rank, or, with 0, of the hidden state. Of each head's queries and keys nope_dim dimensions are not
  # rotated and rope_dim are, the key's being the same for all heads; values have value_dim.
  m.latent = i = ConfigDict(dict(kv_rank=0, q_rank=0, nope_dim=32, rope_dim=16, value_dim=32))
  # Queries see only the index_topk keys with the highest scores of an indexer, index_heads of size index_head_dim, of
  # which rope_dim are rotated, their pairs side by side if index_rope_interleaved (DeepSeek Sparse Attention:
  # DeepSeek-V3.2, GLM-5); 0: all. It is not trained. Layers of index_shared_layers, which count from 0, have none: they
  # use the keys that were chosen in the layer before.
  i.index_topk = 0
  i.index_heads = 4
  i.index_head_dim = 32
  i.index_rope_interleaved = False
  i.index_shared_layers = ()
  # Mixture of experts, each of the form of the MLP, in its place; 0 experts: none. Nothing is dropped, whatever the
  # router chooses.
  m.moe = e = ConfigDict(dict(num_experts=0, experts_per_token=2))
  # Width of each expert. Default: intermediate_size.
  e.expert_size = unset(int)
  # Width of the expert that every token passes through, 0: none; `shared_gate`: times sigmoid(x @ w) (Qwen2-MoE).
  e.shared_size = 0
  e.shared_gate = False
  # Every layer has its MLP and, beside it, experts, each between norms of its own (Gemma 4).
  e.beside_mlp = False
  # The router sees the hidden state divided by its RMS, times a vector that is learned and hidden_size ** -0.5; and the
  # weight of each expert is multiplied by a number that is learned, after the division by their sum (Gemma 4).
  e.router_norm = False
  e.expert_scale = False
  # before_topk: weights are the chosen entries of the softmax over all experts; after_topk: softmax of the chosen.
  e.softmax = "before_topk"
  # Whether the router has a bias (gpt-oss).
  e.router_bias = False
  # softmax: as above. sigmoid: each expert's score by itself (DeepSeek-V3); of the chosen they are the weights.
  e.scores = "softmax"
  # Divide the chosen weights by their sum; then all are multiplied by this.
  e.normalize_weights = True
  e.weight_scale = 1.0
  # Weights are factors on what experts see, and not on what they give (Llama 4).
  e.weights_on_input = False
  # A number for each expert that is added to its score for the choice alone (DeepSeek-V3, arXiv 2412.19437, eq. 16).
  # It has no gradient; a step adds choice_bias_rate to that of an expert with fewer tokens than the mean, and takes as
  # much from that of one with more. 0: it stays as it is.
  e.choice_bias = False
  e.choice_bias_rate = 0.0
  # Experts are in so many groups, of which a token uses those of groups_used: the ones with the highest score, or, of
  # sigmoid scores, with the highest sum of two.
  e.groups = 1
  e.groups_used = 1
  # So many of the first layers have an MLP of intermediate_size in place of experts.
  e.dense_layers = 0
  # Every so manieth layer has experts, and the others such an MLP (2: Llama 4 Maverick).
  e.layer_step = 1
  # Coefficients, in training: load balancing within each document (DeepSeek-V3, eq. 17), and the mean squared
  # log-normaliser of the router (ST-MoE, eq. 5).
  e.balance_loss = 0.0
  e.z_loss = 0.0
  # Modules that predict tokens further ahead, the k-th the token after the next k: multi-token prediction (DeepSeek-V3,
  # arXiv 2412.19437, section 2.2), each with a block of the form of the last layer of attention (strategy.mtp_weight:
  # their loss). Those of a folder of model.hf are read if this says how many; of one without them they begin fresh.
  m.mtp_layers = 0
  # Images: a tower (siglip | clip | qwen2_vl | qwen2_5_vl | qwen3_vl | gemma4 | pixtral; none: a model of text alone)
  # whose features, projected, take the places of some tokens' embeddings, after `scale_embeddings`. Square images of
  # image_size pixels in patches of patch_size; those at the end that make no whole patch are left out. The towers of
  # Qwen, Gemma 4 and Pixtral see images of any size in tiles of image_size pixels, of which each is one token.
  m.vision = v = ConfigDict(dict(tower="none", image_size=224, patch_size=14))
  # The tower's sizes, as those of the model.
  v.num_layers = 4
  v.hidden_size = 128
  v.intermediate_size = 512
  v.num_heads = 4
  # An activation (plain, but for qwen2_5_vl, gemma4 and pixtral), and what is added to the variance in the tower's and
  # projector's norms.
  v.activation = "gelu"
  v.norm_eps = 1e-6
  # Pixels are (x / 255 - mean) / std for each of red, green and blue. Default: those of the tower's family.
  v.mean = ()
  v.std = ()
  # Which features are taken: -1: the last layer's, after the final norm; -2: what enters the last layer, without the
  # final norm (LLaVA); -3: what enters the one before; and so on. CLIP's class token is dropped. All num_layers and the
  # final norm are parameters in any case, so that a checkpoint is written back whole.
  v.feature_layer = -1
  # False: with feature_layer = -1, the last layer's features as they are (LLaVA with SigLIP).
  v.final_norm = True
  # linear (PaliGemma) | mlp: linear, `projector_activation`, linear (LLaVA) | pool: mean of neighbours down to
  # tokens_per_image, RMSNorm, linear without bias (Gemma 3) | merge: norm, the patches of a tile end to end, linear,
  # exact GELU, linear (the towers of Qwen) | mean: of the patches of a tile, RMSNorm without a scale, linear without
  # bias (Gemma 4) | merge_mlp: RMSNorm, the patches of a tile end to end, linear down to the size of one, and then mlp
  # (Mistral 3; Pixtral 12B has mlp) | shuffle: the features of neighbours end to end, as many as make tokens_per_image
  # of them, linear without bias (SmolVLM). `projector_bias` is that of linear, mlp and merge_mlp.
  v.projector = "linear"
  v.projector_activation = "gelu_exact"
  v.projector_bias = True
  # Features of an image. Default: one for each patch; fewer only with pool and shuffle, a square number.
  v.tokens_per_image = unset(int)
  # Of the towers of Qwen: in layers other than those of full_layers, which count from 0, a patch sees those of its
  # square of window × window tiles alone, and not its whole image. Default: no such layers.
  v.window = unset(int)
  v.full_layers = ()
  # How many pixels an image of these towers has, at least and at most: others are enlarged or made smaller, their shape
  # kept. A tile of 28 × 28 pixels is a token. With gemma4 all are made as large as max_pixels allows.
  v.min_pixels = 56 * 56
  v.max_pixels = 28 * 28 * 1280
  # Of qwen3_vl (Qwen3-VL, Qwen3.5): the side of the square table of learned positions, which is stretched over each
  # image (48 in published models); and the layers of the tower whose features, by a projector of each, are added to
  # what the model's first layers give, one layer after the other (DeepStack, arXiv 2406.04334). They count from 0. Of
  # gemma4, position_grid is how many rows, and how many columns, have a learned position (10,240 in published models).
  v.position_grid = 0
  v.deepstack_layers = ()
  # Of gemma4: linear layers of the tower clip what they are given and what they give (E2B, E4B); means of patches are
  # made standard (26B-A4B, 31B). The numbers are those of a checkpoint, and not trained.
  v.clipped = False
  v.standardized = False
  # With shuffle: to how many pixels the longer side of an image is brought, its shape kept, before it is squashed to a
  # square; 0: it is squashed as it is. With pixtral: how long a side is at most; a longer image is made smaller.
  v.longest_side = 0
  # After that, an image larger than a square is also cut into squares of image_size, row by row, each of
  # tokens_per_image tokens, before all of it in one (SmolVLM, Idefics3). Default: False, or what the folder says.
  v.split = unset(bool)
  # Factor on the projected features. The embeddings whose place they take are scaled already.
  v.feature_scale = 1.0
  # What tokens see besides those before them: causal: nothing; image: tokens of one image see each other (Gemma 3), in
  # local layers no further back than the window; local_image: the same, in local layers alone (Gemma 4); prefix: image
  # and prompt see each other (PaliGemma).
  v.attention = "causal"
  # The id of the token that holds an image feature's place.
  v.image_token = unset(int)
  # Videos, of models that see them (docs/images.md). `token` holds the place of a video's feature; unset: none is read.
  # Of SmolVLM it is image_token.
  v.video = w = ConfigDict(dict(token=unset(int)))
  # Of qwen2_5_vl: how many positions a second is, on the axis of time.
  w.tokens_per_second = 0.0
  # Which frames are taken: so many a second, or so many; all where neither is set. With fps at least min_frames, where
  # there are as many, and at most max_frames. Of SmolVLM fps and max_frames say it, of gemma4 one of the first two.
  w.fps = unset(float)
  w.num_frames = unset(int)
  w.min_frames = 4
  w.max_frames = 768
  # How many pixels a frame has, at least and at most; of qwen3_vl all frames together. They keep their shape. Of
  # SmolVLM, whose frames become squares: the square of the side that their longer side is brought to before.
  w.min_pixels = 128 * 28 * 28
  w.max_pixels = 28 * 28 * 768
  # Adapters (LoRA): `rank` above 0 freezes everything but low-rank updates x @ A @ B * scale of the kernels whose
  # path matches one of `targets` (the tower's begin with vision/, the table of tokens is embed/embedding); scale =
  # alpha / rank, or alpha / sqrt(rank) with `rslora`.
  m.lora = a = ConfigDict(dict(rank=0, alpha=16.0, targets=(r"^blocks/(\w*attn|delta|mamba|\w*mlp)/\w+/kernel",)))
  a.rslora = False
  # Each column of an adapted kernel has a length of its own that is trained (DoRA, arXiv 2402.09353).
  a.dora = False
  # Beside the adapters, regexes of parameters that are trained as they are: ("^embed/", "^unembed/") for new tokens.
  a.modules_to_save = ()
  # Ids of tokens, new ones say, whose rows of the embedding, and of the unembedding, are trained, and no other rows.
  a.trainable_token_indices = ()
  # On the adapters' input; training only.
  a.dropout = 0.0
  # A folder in PEFT's format to start the adapters from.
  a.peft = unset(str)
  # Uniform noise on the embeddings in training, of size alpha / sqrt(document length * hidden_size) (NEFTune,
  # arXiv 2310.05914); 0: none.
  m.neftune_alpha = 0.0
  # Dropout on the embeddings and on each residual branch; training only.
  m.dropout = 0.0
  # Standard deviation of the initial weights (output projections: divided by sqrt(2 * num_layers)).
  # Default: fan_in ** -0.5 for matrices, 0.02 for embeddings.
  m.init_std = unset(float)
  # Maximal update parametrisation (muP): the hidden size at which the learning rate was found; that of a wider model is
  # then the same (docs/configuration.md#learning-rates-that-transfer). Default: none.
  m.mup_base_size = unset(int)
  # Run the layers as one scanned loop (compiles fast, whatever the depth) or unrolled.
  m.scan_layers = True
  # auto | blocked | splash (the kernel for TPUs) | triton (those for GPUs): how attention is computed, and on GPUs the
  # gated delta rule. auto takes a device's own kernels where they can; on other devices these are interpreted, which is
  # slow. `attention_block` is how many queries blocked takes at a time.
  m.attention = "auto"
  m.attention_block = 128
  # Cross-entropy and log-probs hold logits of at most this many vocabulary entries at a time, or as many logits of some
  # tokens. Default: 2048 on CPU, 8192 elsewhere, where what each chunk reads and writes is further away.
  m.vocab_chunk = unset(int)
  return m
