"""What learners write: an exercise, what they change in its model answer, the part that is then next, and the words."""

WRONG = [
    (
        "split-and-merge",
        "return x.view(B, T, num_heads, ",
        "return x.view(B, num_heads, ",
        "the shape of the split",
        "a view asks for more or fewer numbers than there are: x is (2, 5, 21), and the view asks for (2, 3, 7)",
    ),
    ("dot-products", "query @ key.T", "query @ key", "the scores", "raises RuntimeError"),
    ("dot-products", "query @ key.T", "key @ query.T", "the scores", "scores"),
    ("dot-products", "query @ key.T", "query * key", "the scores", "it raises RuntimeError"),
    ("dot-products", "query @ key.T", "(query @ key.T).sum(-1)", "the scores", "scores"),
    ("dot-products", "sum(-1", "sum(0", "the softmax", "softmax(scores)[1, 4] is"),
    ("dot-products", "powers.sum(-1, keepdim=True)", "powers.sum(-1)", "the softmax", "it raises RuntimeError"),
    ("dot-products", "powers.sum(-1, keepdim=True)", "powers.sum()", "the softmax", "softmax"),
    ("dot-products", "scores - scores.max(-1, keepdim=True).values", "scores", "the softmax of large scores", "is nan"),
    ("dot-products", "scores.max(-1, keepdim=True).values", "scores.max()", "the softmax of large scores", "softmax"),
    ("dot-products", "@ value", "@ value.cumsum(0)", "the average of the values", "expected"),
    (
        "dot-products",
        "return softmax(scores(query, key)) @ value",
        "return scores(query, key) @ value",
        "the average of the values",
        "attend",
    ),
    (
        "dot-products",
        "powers = torch.exp(scores - scores.max(-1, keepdim=True).values)",
        "return torch.softmax(scores, dim=-1)",
        "the softmax",
        "it calls torch's softmax",
    ),
    ("one-head", "self.key(x), self", "self.query(x), self", "the three projections", "the wrong role"),
    (
        "one-head",
        "self.value = nn.Linear(d_model, d_head, bias=False)",
        "self.value = self.key",
        "the three projections",
        "queries, keys and values do not each have a",
    ),
    (
        "one-head",
        "scores.softmax(-1)",
        "torch.sigmoid(scores)",
        "the three projections",
        "no product of queries and keys that goes through",
    ),
    (
        "one-head",
        "query @ key.transpose(-2, -1)",
        "key @ query.transpose(-2, -1)",
        "the three projections",
        "a projection or an input is used in the",
    ),
    (
        "one-head",
        "query @ key.transpose(-2, -1)",
        "query @ query.transpose(-2, -1)",
        "the scores",
        "a projection or an input is used in the",
    ),
    ("one-head", "query @ key.transpose(-2, -1)", "query @ key.T", "the scores", "it raises RuntimeError"),
    ("one-head", "query @ key.transpose(-2, -1)", "query @ key", "the scores", "it raises RuntimeError"),
    ("one-head", "softmax(-1)", "softmax(-2)", "the softmax", "the softmax runs over the wrong axis"),
    ("one-head", "scores.softmax(-1) @ value", "scores @ value", "the softmax", "there is no softmax"),
    (
        "one-head",
        "softmax(-1) @ value",
        "softmax(-1) @ key",
        "the weighted values",
        "a projection or an input is used in the",
    ),
    (
        "one-head",
        "softmax(-1) @ value",
        "softmax(-1) @ x",
        "the weighted values",
        "queries, keys and values are not projected",
    ),
    (
        "one-head",
        "scores.softmax(-1) @ value",
        "scores.softmax(-1)",
        "the weighted values",
        "a projection is created and never used",
    ),
    ("scale", ".sum(-1).std()", ".std()", "the measurement", "spread(4) is"),
    ("scale", "torch.randn(2, 20_000, width)", "torch.rand(2, 20_000, width)", "the measurement", "spread"),
    (
        "scale",
        "self.query(x), self.key(x), self.value(x)",
        "self.query(x), self.query(x), self.value(x)",
        "the head itself",
        "a projection or an input is used in the",
    ),
    ("scale", "softmax(-1)", "softmax(1)", "the head itself", "the softmax runs over the wrong axis"),
    ("scale", " / math.sqrt(query.shape[-1])", "", "the scale", "scores are not scaled"),
    ("scale", "math.sqrt(query.shape[-1])", "math.sqrt(x.shape[-1])", "the scale", "square root of the model width"),
    (
        "scale",
        " / math.sqrt(query.shape[-1])",
        " * math.sqrt(query.shape[-1])",
        "the scale",
        "scores are multiplied by √D instead of divided",
    ),
    (
        "scale",
        " / math.sqrt(query.shape[-1])",
        " / query.shape[-1]",
        "the scale",
        "scores are divided by D instead of √D",
    ),
    (
        "scale",
        "scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])\n"
        "        return scores.softmax(-1) @ value",
        "scores = query @ key.transpose(-2, -1)\n"
        "        return scores.softmax(-1) / math.sqrt(query.shape[-1]) @ value",
        "the scale",
        "the scale is applied after the softmax",
    ),
    ("mask", ".tril()", ".triu()", "the triangle", "causal_mask(5)[0, 1] is True; expected False"),
    ("mask", ", dtype=torch.bool).tril()", ").tril()", "the triangle", "expected booleans"),
    ("mask", ".tril()", ".tril(-1)", "the triangle", "causal_mask"),
    ("mask", "dtype=torch.bool).tril()", "dtype=torch.bool).triu(1)", "the triangle", "causal_mask"),
    ("mask", " / math.sqrt(query.shape[-1])", "", "the scaled head", "scores are not scaled"),
    ("mask", "softmax(-1)", "softmax(-2)", "the scaled head", "the softmax runs over the wrong axis"),
    ("mask", "-math.inf", "0.0", "the future is hidden", "they see the future"),
    ("mask", "masked_fill(~visible, -math.inf)", "masked_fill(visible, -math.inf)", "the future is hidden", "tokens"),
    (
        "mask",
        "scores = scores.masked_fill(~visible, -math.inf)\n        return scores.softmax(-1) @ value",
        "return scores.softmax(-1).masked_fill(~visible, 0.0) @ value",
        "the future is hidden",
        "tokens",
    ),
    ("mask", "scores = scores.masked_fill", "scores.masked_fill", "the future is hidden", "tokens"),
    (
        "mask",
        "masked_fill(~visible, -math.inf)",
        "masked_fill(~visible.tril(-1), -math.inf)",
        "nothing else is hidden",
        "the causal mask is off by one",
    ),
    ("list-of-heads", " / math.sqrt(query.shape[-1])", "", "the heads", "scores are not scaled"),
    ("list-of-heads", ".triu(1)", ".triu(0)", "the heads", "the causal mask is off by one"),
    (
        "list-of-heads",
        "nn.ModuleList(SmallHead(d_model, d_model // num_heads) for _ in range(num_heads))",
        "[SmallHead(d_model, d_model // num_heads) for _ in range(num_heads)]",
        "the heads",
        "layers are kept in a plain list",
    ),
    (
        "list-of-heads",
        "nn.ModuleList(SmallHead(d_model, d_model // num_heads) for _ in range(num_heads))",
        "nn.ModuleList([SmallHead(d_model, d_model // num_heads)] * num_heads)",
        "the heads",
        "all heads use the same weights",
    ),
    (
        "list-of-heads",
        "SmallHead(d_model, d_model // num_heads)",
        "SmallHead(d_model, d_model)",
        "the concatenation",
        "it raises RuntimeError",
    ),
    (
        "list-of-heads",
        "torch.cat([head(x) for head in self.heads], dim=-1)",
        "torch.cat([head(x) for head in self.heads], dim=1)",
        "the concatenation",
        "it raises RuntimeError",
    ),
    (
        "list-of-heads",
        "torch.cat([head(x) for head in self.heads], dim=-1)",
        "sum(head(x) for head in self.heads).repeat(1, 1, len(self.heads))",
        "the concatenation",
        "heads are added up instead of concatenated",
    ),
    (
        "list-of-heads",
        "self.out(torch.cat([head(x) for head in self.heads], dim=-1))",
        "torch.cat([head(x) for head in self.heads], dim=-1)",
        "the output projection",
        "output projection",
    ),
    (
        "split-and-merge",
        "x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
        "x.view(B, T, num_heads, E // num_heads)",
        "the shape of the split",
        "split_heads gives shape",
    ),
    (
        "split-and-merge",
        "x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
        "x.view(B, num_heads, T, E // num_heads)",
        "the numbers of the split",
        "expected",
    ),
    (
        "split-and-merge",
        "x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
        "x.view(B, T, E // num_heads, num_heads).permute(0, 3, 1, 2)",
        "the numbers of the split",
        "split_heads",
    ),
    (
        "split-and-merge",
        ".transpose(1, 2).contiguous().view(B, T, H * D)",
        ".transpose(1, 2).view(B, T, H * D)",
        "the merge",
        "raises RuntimeError",
    ),
    (
        "split-and-merge",
        "heads.transpose(1, 2).contiguous().view(B, T, H * D)",
        "heads.contiguous().view(B, T, H * D)",
        "the merge",
        "merge_heads",
    ),
    (
        "split-and-merge",
        "heads.transpose(1, 2).contiguous().view(B, T, H * D)",
        "heads.permute(0, 2, 3, 1).reshape(B, T, H * D)",
        "the merge",
        "merge_heads",
    ),
    (
        "all-heads-at-once",
        "key = self.key(x)",
        "key = self.query(x)",
        "the projections",
        "a projection or an input is used in the",
    ),
    (
        "all-heads-at-once",
        "self.value(x).view(B, T, H, D).transpose(1, 2)",
        "self.key(x).view(B, T, H, D).transpose(1, 2)",
        "the projections",
        "a projection or an input is used in the",
    ),
    (
        "all-heads-at-once",
        "(weights @ value)",
        "(weights @ key)",
        "softmax and values",
        "a projection or an input is used in the",
    ),
    (
        "all-heads-at-once",
        ".view(B, T, H, D).transpose(1, 2)",
        ".view(B, H, T, D)",
        "the split",
        "heads are split by a view where a transpose",
    ),
    ("all-heads-at-once", "math.sqrt(D)", "math.sqrt(E)", "scores and scale", "square root of the model width"),
    ("all-heads-at-once", "triu(1)", "triu(2)", "the mask", "mask"),
    ("all-heads-at-once", ".masked_fill(future, -math.inf)", "", "the mask", "the causal mask has no effect"),
    ("list-of-heads", ".masked_fill(future, -math.inf)", "", "the heads", "a mask is made and never used"),
    ("all-heads-at-once", " / math.sqrt(D)", "", "scores and scale", "scores are not scaled"),
    (
        "all-heads-at-once",
        "masked_fill(future, -math.inf)",
        "masked_fill(future, 0.0)",
        "the mask",
        "masked keys keep some weight",
    ),
    ("all-heads-at-once", "softmax(-1)", "softmax(1)", "softmax and values", "the softmax runs over the wrong axis"),
    ("all-heads-at-once", "softmax(-1)", "softmax(-2)", "softmax and values", "the softmax runs over the wrong axis"),
    (
        "all-heads-at-once",
        "transpose(1, 2).contiguous().view(B, T, E)",
        "contiguous().view(B, T, E)",
        "the merge",
        "heads are merged by a view",
    ),
    (
        "all-heads-at-once",
        "return self.out(merged)",
        "return merged",
        "the output projection",
        "no output projection is applied",
    ),
    (
        "all-heads-at-once",
        "return self.out(merged)",
        "return x + self.out(merged)",
        "the output projection",
        "the input is added to the output",
    ),
    (
        "masks-and-padding",
        "(torch.arange(longest) < lengths[:, None])[:, None, None]",
        "torch.arange(longest) < lengths[:, None]",
        "the padding mask",
        "padding_mask gives shape",
    ),
    ("masks-and-padding", "< lengths", "<= lengths", "the padding mask", "padding_mask"),
    ("masks-and-padding", "< lengths", ">= lengths", "the padding mask", "padding_mask"),
    (
        "masks-and-padding",
        " / math.sqrt(D)",
        " / math.sqrt(E)",
        "the layer without a mask",
        "scores are divided by the square root of the",
    ),
    (
        "masks-and-padding",
        "return self.out((weights @ value).transpose(1, 2).reshape(B, T, E))",
        "return (weights @ value).transpose(1, 2).reshape(B, T, E)",
        "the layer without a mask",
        "no output projection is applied",
    ),
    ("masks-and-padding", "masked_fill(~mask, -math.inf)", "masked_fill(mask, -math.inf)", "the mask argument", "mask"),
    (
        "masks-and-padding",
        "scores = scores.masked_fill(~mask, -math.inf)",
        "pass",
        "the mask argument",
        "the mask is applied after the softmax",
    ),
    (
        "masks-and-padding",
        "masked_fill(~mask, -math.inf)",
        "masked_fill(~mask, 0.0)",
        "the mask argument",
        "the mask is applied after the softmax",
    ),
    (
        "masks-and-padding",
        "scores.masked_fill(~mask, -math.inf)",
        "scores.masked_fill(~mask[:1], -math.inf)",
        "the mask argument",
        "does something else than the same mask expanded to",
    ),
    ("masks-and-padding", "weights = weights.masked_fill(~mask, 0.0)", "pass", "a query that sees nothing", "NaN"),
    ("cross-attention", "self.split(self.value(memory))", "self.split(self.value(x))", "two lengths", "raises"),
    (
        "cross-attention",
        "query = self.split(self.query(x))",
        "query = self.split(self.query(memory))",
        "two lengths",
        "",
    ),
    (
        "cross-attention",
        "self.split(self.key(memory)), self.split(self.value(memory))",
        "self.split(self.key(x)), self.split(self.value(x))",
        "who reads whom",
        "token",
    ),
    (
        "cross-attention",
        "x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)",
        "x.view(x.shape[0], self.num_heads, x.shape[1], -1)",
        "the rest of the layer",
        "where a transpose is needed",
    ),
    ("cross-attention", " / math.sqrt(query.shape[-1])", "", "the rest of the layer", "scores are not scaled"),
    (
        "cross-attention",
        "return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))",
        "return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)",
        "the rest of the layer",
        "no output projection is applied",
    ),
    ("dropout", " / math.sqrt(D)", " / D", "the layer itself", "scores are divided by D instead of √D"),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))\n"
        "        return self.out((weights @ value).transpose(1, 2).reshape(B, T, E))",
        "scores.masked_fill(future, -math.inf).softmax(-1)\n"
        "        return self.dropout(self.out((weights @ value).transpose(1, 2).reshape(B, T, E)))",
        "dropout in training",
        "changes its output",
    ),
    ("dropout", ".triu(1)", ".triu(2)", "the layer itself", "the causal mask is off by one"),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
        "nn.functional.dropout(scores.masked_fill(future, -math.inf).softmax(-1), 0.1)",
        "quiet in evaluation",
        "differ",
    ),
    (
        "dropout",
        "self.dropout = nn.Dropout(dropout)",
        "self.dropout = lambda w: nn.functional.dropout(w, dropout, True)",
        "quiet in evaluation",
        "two calls differ in evaluation mode",
    ),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
        "scores.masked_fill(future, -math.inf).softmax(-1)",
        "dropout in training",
        "two calls agree in training mode, with dropout=",
    ),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
        "self.dropout(scores).masked_fill(future, -math.inf).softmax(-1)",
        "dropout in training",
        "dropout is applied before the softmax",
    ),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1));"
        " weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)",
        "the average stays",
        "dropout changes the average",
    ),
    (
        "dropout",
        "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
        "scores.masked_fill(future, -math.inf).softmax(-1) * "
        "(torch.rand_like(scores) > self.dropout.p if self.training else 1)",
        "the average stays",
        "dropout changes the average",
    ),
    (
        "cache-and-grouped-heads",
        "self.key = nn.Linear(d_model, num_kv_heads * self.d_head)\n"
        "        self.value = nn.Linear(d_model, num_kv_heads * self.d_head)",
        "self.key = nn.Linear(d_model, d_model)\n        self.value = nn.Linear(d_model, d_model)",
        "fewer key/value heads",
        "",
    ),
    (
        "cache-and-grouped-heads",
        "repeat_interleave(group, 1), value.repeat_interleave(group, 1)",
        "repeat(1, group, 1, 1), value.repeat(1, group, 1, 1)",
        "the layer without a cache",
        "",
    ),
    (
        "cache-and-grouped-heads",
        "math.sqrt(self.d_head)",
        "math.sqrt(x.shape[-1])",
        "the layer without a cache",
        "scores are divided by the square root of the",
    ),
    (
        "cache-and-grouped-heads",
        "        cache, S = (key, value), key.shape[2]\n",
        "        S = key.shape[2]\n",
        "what the cache holds",
        "the cache holds NoneType",
    ),
    (
        "cache-and-grouped-heads",
        "cache, S = (key, value), key.shape[2]",
        "cache, S = (x, x), key.shape[2]",
        "what the cache holds",
        "the cache holds",
    ),
    ("cache-and-grouped-heads", "triu(S - T + 1)", "triu(1)", "token by token", "the output of"),
    (
        "cache-and-grouped-heads",
        "torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)",
        "torch.cat([key, cache[0]], 2), torch.cat([value, cache[1]], 2)",
        "what the cache holds",
        "in the wrong order: the old ones come first",
    ),
    (
        "cache-and-grouped-heads",
        "torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)",
        "cache[0] + key, cache[1] + value",
        "what the cache holds",
        "it raises RuntimeError",
    ),
    (
        "block",
        "return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))",
        "return self.up(self.second_norm(x))",
        "the shape",
        "the block gives shape",
    ),
    ("block", "x = x + self.attention", "x = self.attention", "the residual stream", "with all projections at 0"),
    ("block", "return x + self.down", "return self.down", "the residual stream", "with all projections at"),
    (
        "block",
        "x = x + self.attention(self.first_norm(x))",
        "x = self.first_norm(x + self.attention(x))",
        "the residual stream",
        "the stream itself is normalized",
    ),
    (
        "block",
        "x = x + self.attention(self.first_norm(x))",
        "x = x + self.first_norm(x)",
        "the residual stream",
        "with all projections at",
    ),
    (
        "block",
        "x = x + self.attention(self.first_norm(x))",
        "x = x + self.attention(x)",
        "the norms",
        "what the block adds grows with the size of",
    ),
    ("block", "self.up(self.second_norm(x))", "self.up(x)", "the norms", "what the block adds grows with the size of"),
    ("block", "causal=True", "causal=False", "the attention", "tokens 0 and 1 changed"),
    (
        "block",
        "self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)",
        "self.up, self.down = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)",
        "the feed-forward part",
        "no matrix is wider than the model",
    ),
    (
        "block",
        "nn.functional.gelu(self.up(self.second_norm(x)))",
        "self.up(self.second_norm(x))",
        "the feed-forward part",
        "what the block adds is linear",
    ),
    (
        "block",
        "        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))",
        "        return x",
        "the feed-forward part",
        "what the block adds is linear",
    ),
    (
        "tiny-gpt",
        "self.logits = nn.Linear(d_model, vocabulary)",
        "self.logits = nn.Linear(d_model, d_model)",
        "the logits",
        "tokens",
    ),
    (
        "tiny-gpt",
        "return self.logits(self.norm(self.blocks(x)))",
        "return self.logits(self.norm(self.blocks(x))).softmax(-1)",
        "the logits",
        "the model returns probabilities",
    ),
    ("tiny-gpt", "(tokens) + self.positions(positions)", "(tokens)", "the positions", "does not know positions"),
    ("tiny-gpt", "causal=True", "causal=False", "the future stays hidden", "logits"),
    (
        "tiny-gpt",
        "self.blocks = nn.Sequential(*(Block(d_model, num_heads) for _ in range(num_layers)))",
        "self.blocks = nn.Sequential()",
        "the future stays hidden",
        "logits at",
    ),
    ("tiny-gpt", "tokens[:, 1:]", "tokens[:, :-1]", "the loss", "logits at i predict letter i + 1"),
    (
        "tiny-gpt",
        "logits.flatten(0, 1), tokens[:, 1:].flatten()",
        "logits.flatten(0, 1).softmax(-1), tokens[:, 1:].flatten()",
        "the loss",
        "a model that is always right has a loss",
    ),
    (
        "tiny-gpt",
        "return self.logits(self.norm(self.blocks(x)))",
        "return self.logits(self.norm(self.blocks(x))).detach()",
        "it learns",
        "raises RuntimeError",
    ),
    ("reading-heads", "diagonal(-1", "diagonal(0", "the previous token", "previous_token(weights)[0] is"),
    (
        "reading-heads",
        ".mean(-1)\n\n\ndef entropy",
        ".sum(-1)\n\n\ndef entropy",
        "the previous token",
        "previous_token",
    ),
    ("reading-heads", "torch.special.entr(weights)", "(-weights * weights.log())", "the entropy", "0 · log 0"),
    ("reading-heads", "sum(-1).mean(-1)", "sum(-1).sum(-1)", "the entropy", "entropy"),
    ("reading-heads", "int(shares.argmax())", "int(shares.mean(-1).argmax())", "the head", "find_head gives"),
    (
        "reading-heads",
        "divmod(int(shares.argmax()), shares.shape[1])\n    return layer, head",
        "divmod(int(shares.argmax()), shares.shape[1])\n    return head, layer",
        "the head",
        "find_head gives",
    ),
]
# Changes that give the same layer.
SAME = [
    (
        "list-of-heads",
        "torch.cat([head(x) for head in self.heads], dim=-1)",
        "torch.stack([head(x) for head in self.heads], -1).flatten(-2)",
    ),
    ("masks-and-padding", "masked_fill(~mask, -math.inf)", "masked_fill(mask == 0, -1e9)"),
]


# Errors: the exercise, what to replace, by what, the part in which the error is, its words, and the parts before it.
RAISING = [
    ("one-head", "super().__init__()", "pass", "the three projections", "`super().__init__()` is not called", []),
    ("one-head", "self.key(x)", "self.key", "the scores", "is a layer used that was not called?", None),
    ("one-head", "scores.softmax(-1)", "torch.softmax(scores)", "the softmax", "gives no dim", ["✓", "✓"]),
    ("scale", "math.sqrt(query.shape[-1])", "torch.sqrt(query.shape[-1])", "the scale", "is given the int 7",
     ["✓", "·"]),
    ("mask", "~visible", "~visibl", "the future is hidden", "name 'visibl'", ["✓", "·"]),
    ("list-of-heads", "[head(x) for head in self.heads], dim=-1", "head(x) for head in self.heads",
     "the concatenation", "not generator", ["·"]),
    ("list-of-heads", "SmallHead(d_model, d_model // num_heads)", "SmallHead(d_model, d_model)",
     "the concatenation", "takes width 12 and gets (2 samples, 5 tokens, 36): 3 heads of 12", ["✓"]),
    ("all-heads-at-once", "x.shape\n", "x.shap\n", "the projections", "x.shap; did you mean shape?", []),
    ("all-heads-at-once", "scores.masked_fill(future", "scores.masked_fill(futur", "the mask", "'futur'",
     ["✓", "✓", "✓"]),
    ("all-heads-at-once", "weights @ value", "weights @ valu", "softmax and values", "'valu'", ["✓"] * 4),
    ("all-heads-at-once", "(weights @ value)", 'torch.einsum("bhts,bhde->bhtd", weights, value)', "softmax and values",
     "and the view asks for (2 samples, 5 tokens, width 12)", ["✓"] * 4),
    ("all-heads-at-once", ".contiguous()", "", "the merge", "a view of a transposed tensor", ["✓"] * 5),
    ("all-heads-at-once", "self.out(merged)", "self.outt(merged)", "the output projection",
     "self.outt; did you mean out?", ["✓"] * 6),
    ("all-heads-at-once", "range(4)", "range(3)", "the projections", "expected 4, got 3", []),
    ("cache-and-grouped-heads", ".reshape(B, T, -1)), cache", ".reshape(B, T, -1))", "what the cache holds",
     "expected two results, the output and the cache", ["✓", "✓"]),
    ("cross-attention", "x.unflatten(-1, (self.num_heads, -1))", "x.view(2, 5, self.num_heads, -1)", "two lengths",
     "x is (2 samples, 7 keys, width 12), and the view asks for (2 samples, 5 tokens, 3 heads, -1)", []),
    ("cross-attention", "query @ key.transpose(-2, -1)", "query @ key", "two lengths",
     "the head widths of both must meet: key needs transpose(-2, -1)", []),
    ("cache-and-grouped-heads", "key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)",
     "pass", "the layer without a cache", "but before them 6 heads meet 2", ["✓"]),
    ("cache-and-grouped-heads", ".transpose(1, 2).reshape(B, T, -1)", "", "the layer without a cache",
     "the heads are not concatenated yet", ["✓"]),
    ("cache-and-grouped-heads", "torch.ones(T, S,", "torch.ones(T, T,", "what the cache holds", "future is (2, 2)",
     ["✓", "✓"]),
    ("cache-and-grouped-heads", "[cache[0], key], 2", "[cache[0], key], 1", "what the cache holds",
     "cache[0] is (1, 2, 3, head width 4), key is (1, 2, 2, head width 4)", ["✓", "✓"]),
    ("block", "4 * d_model, d_model)", "d_model, d_model)", "the shape", "self.down takes 12 and gets (2, 5, 48)", []),
    ("block", "self, x: Tensor)", "x: Tensor)", "the shape", "forward has no self", []),
]  # fmt: skip

# Answers that ignore an argument, or do the steps in another order than the task says: as in WRONG.
BLOCK = (
    "x = x + self.attention(self.first_norm(x))\n"
    "        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))"
)
BLOCKS = "nn.Sequential(*(Block(d_model, num_heads) for _ in range(num_layers)))"
PASSED = "def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:"
CAUSAL = "torch.ones(x.shape[1], x.shape[1]).triu(1).bool()"
IGNORING = [
    ("one-head", "scores.softmax", f"scores.masked_fill({CAUSAL}, -math.inf).softmax", "the scores",
     "its earlier outputs do not change with the last token"),
    ("one-head", "transpose(-2, -1)", "transpose(-2, -1) / query.shape[-1] ** 0.5", "the scores",
     "leave that to exercise 3"),
    ("scale", "20_000", "100", "the measurement", "with at least 10,000 dot products"),
    ("scale", "scores.softmax", f"scores.masked_fill({CAUSAL}, -math.inf).softmax", "the head itself",
     "Nothing is hidden here"),
    ("mask", "torch.ones(length, length, dtype=torch.bool)", "torch.ones(5, 5, dtype=torch.bool)", "the triangle",
     "causal_mask(3) has shape (5, 5)"),
    ("split-and-merge", "num_heads, E // num_heads", "3, E // 3", "the shape of the split", "the view asks for"),
    ("split-and-merge", "H * D", "21", "the merge", "the view asks for (2, 5, 21)"),
    ("masks-and-padding", "torch.arange(longest)", "torch.arange(lengths.max())", "the padding mask",
     "padding_mask gives shape (3, 1, 1, 5) for 3 lengths and longest=7; expected (3, 1, 1, 7)"),
    ("masks-and-padding", "if mask is not None:\n            scores",
     "if mask is None:\n            mask = torch.ones(T, T).tril().bool()\n"
     "        if mask is not None:\n            scores",
     "the layer without a mask", "called with x alone, its earlier outputs do not change"),
    ("masks-and-padding", "(~mask, ", "(~mask[:, :1], ", "the mask argument", "a mask of shape (5, 5) does something"),
    ("masks-and-padding", "if mask is not None:\n            scores",
     "if mask is not None:\n            mask = mask if mask.dim() < 4 else mask[:, :, :1]\n            scores",
     "the mask argument", "a mask of shape (5, 5) does something"),
    ("cross-attention", "scores.softmax(-1)",
     "scores.masked_fill(torch.ones(scores.shape[-2:]).triu(3).bool(), -math.inf).softmax(-1)", "who reads whom",
     "output 0 does not depend on token 3 of 11 in memory"),
    ("cross-attention", "query = self", "memory = memory[:, :7]; query = self", "the rest of the layer",
     "it works for one size only"),
    ("dropout", "nn.Dropout(dropout)", "nn.Dropout(0.5)", "dropout in training", "with dropout=0.2 50% of the weights"),
    ("dropout", "nn.Dropout(dropout)", "nn.Dropout(1 - dropout)", "dropout in training", "80% of the weights"),
    ("dropout", "dropout: float = 0.1", "dropout: float = 0.5", "dropout in training", "made without a dropout"),
    ("dropout", "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
     "scores.masked_fill(future, -math.inf).softmax(-1) * (torch.rand_like(scores) > 0.1)", "quiet in evaluation",
     "two calls differ in evaluation mode"),
    ("dropout", "future, -math.inf", "future & False, -math.inf", "the layer itself", ""),
    ("cache-and-grouped-heads", "self.d_head = num_heads,", "self.d_head = 6,", "token by token", "the view asks for"),
    ("cache-and-grouped-heads", "= num_heads, num_kv_heads,", "= num_heads, 2,", "the layer without a cache",
     "the view asks for"),
    ("block", BLOCK,
     "return x + self.attention(self.first_norm(x)) + self.down(nn.functional.gelu(self.up(self.second_norm(x))))",
     "the feed-forward part", "reads the stream from before the attention"),
    ("block", BLOCK,
     "x = x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))\n"
     "        return x + self.attention(self.first_norm(x))",
     "the feed-forward part", "comes before the attention"),
    ("block", "functional.gelu", "functional.relu", "the feed-forward part", "is a ReLU; expected a GELU"),
    ("block", "functional.gelu", "functional.silu", "the feed-forward part", "is a SiLU; expected a GELU"),
    ("block", "return x + self.down", "return x + 0.5 * self.down", "the feed-forward part", "adds 0.421"),
    ("block", "nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)",
     "nn.Linear(d_model, 8 * d_model), nn.Linear(8 * d_model, d_model)", "the feed-forward part", "the widest has 96"),
    ("block", "(d_model, num_heads, causal", "(d_model, 1, causal", "the attention", "num_heads is not used"),
    ("tiny-gpt", "range(num_layers)", "range(1)", "it learns", "with 1, 2 and 4 layers, the model has 2,"),
    ("tiny-gpt", BLOCKS, "nn.Sequential(*[Block(d_model, num_heads)] * num_layers)", "it learns", "its own weights"),
    ("tiny-gpt", "(Block(d_model, num_heads)", "(Block(d_model, 1)", "it learns", "num_heads is not used"),
    ("tiny-gpt", "nn.Embedding(context", "nn.Embedding(48", "the positions", "a context of 60 fails on 60 letters"),
    ("tiny-gpt", "self.norm = nn.LayerNorm(d_model)", "self.norm = nn.Identity()", "it learns", "a norm comes before"),
    ("tiny-gpt", "logits.flatten(0, 1), tokens[:, 1:].flatten()", "logits[:, -1], tokens[:, -1]", "the loss",
     "the mean over 3 texts of 8 letters"),
    ("tiny-gpt", "logits.flatten(0, 1)", "logits.softmax(-1).flatten(0, 1)", "the loss", "here it gets their softmax"),
    ("reading-heads", "    return layer, head", "    return 4, 2", "the head", "for the first 4 layers of the model"),
    ("reading-heads", "model.tokens(text)", "model.tokens('A dark evening')", "the head", "for the first 4 layers"),
]  # fmt: skip

# The same layers in other styles: what is tried by arguments must not refuse them.
OWN_BLOCK = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.mix = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.mix(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.n1, self.n2, self.attn = nn.RMSNorm(d_model), nn.RMSNorm(d_model), Attention(d_model, num_heads)
        self.w1 = nn.Parameter(torch.randn(d_model, 4 * d_model) * 0.02)
        self.w2 = nn.Parameter(torch.randn(4 * d_model, d_model) * 0.02)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.attn(self.n1(x)) + x
        return y + self.drop(nn.functional.gelu(self.n2(y) @ self.w1, approximate="tanh") @ self.w2)
"""
LISTED_BLOCK = OWN_BLOCK.replace(
    "super().__init__()\n        self.heads, self.qkv, self.mix = heads, nn.Linear(width, 3 * width), ",
    "super().__init__()\n"
    "        self.parts = nn.ModuleList(nn.Linear(width, 3 * width // heads) for _ in range(heads))\n"
    "        self.mix = ",
).replace(
    "q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))",
    "q, k, v = (torch.stack(t, 1) for t in zip(*(part(x).chunk(3, -1) for part in self.parts)))",
)
OWN_GPT = (
    OWN_BLOCK
    + """
class TinyGPT(nn.Module):
    def __init__(self, vocabulary, d_model, num_heads, num_layers, context):
        super().__init__()
        self.letters = nn.Embedding(vocabulary, d_model)
        self.places = nn.Parameter(torch.randn(context, d_model) * 0.1)
        self.layers = nn.ModuleList([Block(d_model, num_heads) for _ in range(num_layers)])
        self.norm, self.logits = nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary, bias=False)
        self.logits.weight = self.letters.weight
        nn.init.normal_(self.letters.weight, std=0.05)

    def forward(self, tokens):
        x = self.letters(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))

def loss(model, tokens):
    logits = model(tokens)[:, :-1].log_softmax(-1)
    return -logits.gather(-1, tokens[:, 1:, None]).mean()
"""
)
OTHER_STYLES = {
    "own attention": ("block", OWN_BLOCK),
    "list of heads": ("block", LISTED_BLOCK),
    "tied": ("tiny-gpt", OWN_GPT),
}
