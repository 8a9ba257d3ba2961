"""What people call things: one table of names for constructors, configurations, module constants and calls.

`SETTINGS` holds the meanings of sizes and options, `ARGUMENTS` those of what a call takes: the same word may mean one
thing in a constructor and another in a call (`context` is a length there and a memory here). `VALUES` holds the usual
values of everything else that has a name of its own, wherever it appears.
"""

import functools
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

ROTARY_BASE = 10000.0
CONFIGURATION = re.compile(
    r"\w*config\w*|configs?|cfg|args|modelargs|conf|\w*h?params?|hp|opts?|options|c|settings|arguments?|self|namespace|flags"
)


# Words of other scripts, longest first where one begins another; accents are removed later.
TRANSLATED = {
    "输入": "input", "输出": "output", "模型": "model", "嵌入": "embed", "隐藏": "hidden", "维度": "dim", "维数": "dim",
    "特征": "feature", "上下文": "context", "最大": "max", "序列": "seq", "长度": "len", "注意力": "attention",
    "多头": "multihead", "头": "head", "数量": "num", "个数": "num", "大小": "size", "查询": "query", "键": "key",
    "值": "value", "掩码": "mask", "遮罩": "mask", "丢弃": "drop", "失活": "drop", "偏置": "bias", "因果": "causal",
    "批次": "batch", "记忆": "memory", "编码器": "encoder", "解码器": "decoder",
    "入力": "input", "出力": "output", "モデル": "model", "埋め込み": "embed", "次元": "dim", "文脈": "context",
    "系列": "seq", "ヘッド": "head", "クエリ": "query", "キー": "key", "バリュー": "value", "マスク": "mask",
    "ドロップアウト": "dropout", "バイアス": "bias",
    "입력": "input", "출력": "output", "모델": "model", "임베딩": "embed", "차원": "dim", "문맥": "context",
    "시퀀스": "seq", "길이": "len", "헤드": "head", "개수": "num", "쿼리": "query", "마스크": "mask",
    "드롭아웃": "dropout", "값": "value", "키": "key",
    "вход": "input", "выход": "output", "модел": "model", "эмбеддинг": "embed", "размерность": "dim",
    "размер": "size", "контекст": "context", "длина": "len", "голов": "head", "число": "num", "запрос": "query",
    "ключ": "key", "значен": "value", "маск": "mask", "维": "dim", "数": "num", "長": "len", "수": "num",
}  # fmt: skip


def plain(name: str) -> str:
    """A name without case, underscores and accents: `n_embd`, `nEmbd` and `N_EMBD` become the same.

    >>> plain("头数"), plain("têtes")
    ('headnum', 'tetes')
    """
    word = name.lower()
    if not word.isascii():
        for foreign, english in TRANSLATED.items():
            word = word.replace(foreign, english)
        word = unicodedata.normalize("NFKD", word)
    return re.sub(r"[^a-z0-9]", "", word)


@dataclass(frozen=True)
class Meaning:
    """A role and how it is written: whole words first, then a pattern, unless another pattern is found too."""

    role: str
    words: str = ""
    pattern: str | None = None
    unless: str | None = None
    known: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", frozenset(self.words.split()))

    def fits(self, word: str) -> bool:
        """Whether the pattern is found in a plain word."""
        if self.pattern is None or (self.unless is not None and re.search(self.unless, word)):
            return False
        return re.search(self.pattern, word) is not None


SETTINGS = (
    Meaning("heads", "h headnum headcount nh head headsnum headsnumber hnum attentionhead hq nq qh nhq nqh numq"),
    Meaning(
        "kv_heads",
        "numkvgroups nkvgroups numgroups ngroups groups numberofgroups numquerygroups nquerygroups querygroups "
        "groupnum numgroup nkv numkv kvgroups hkv kvh nhkv nkvh kvnum",
    ),
    Meaning(
        "value_width", "dv dimv vdim valuedim dvalue dimvalue vheaddim valueheaddim headdimv dheadv vhdim headvdim"
    ),
    Meaning(
        "head_width",
        "dk dq dhead keydim depth dimkey headfeatures dkey dquery qkdim dimq dimk qdim kdim dkv dqk headchannels "
        "dimperhead hd dh drope dnope ropedim nopedim dimrope dimnope "
        "rotarydim rotdim",
    ),
    Meaning(
        "context",
        "nctx maxcontext numtokens ntokens maxtokens context maxt npositions tokens maxctx maxseq ctx windowsize "
        "numpatches npatches inputlength inputlen maxposition maxpositions lookback",
    ),
    Meaning(
        "out_width",
        "dout dimout doutput outdimension dimoutput",
        r"(out|output)(dim|size|width|features|channels?|filters|d)$",
    ),
    Meaning(
        "width",
        "dim embsize modelsize din features width c d e dimin dimmodel numhiddens attentiondim attentionsize dattn "
        "size nunits units nfeat nstate nx attndim dimension inputdimension dinput dinp dimfeatures allheadsize "
        "contextdim crossdim dcontext crossattentiondim innerdim totaldim model qsize fdim featdim hdim encdim decdim "
        "dimquery latentdim ninp inplanes encoderdim decoderdim modelwidth tokendim dtoken nmodel",
    ),
    Meaning("batch", "batchsize batch maxbatchsize maxbatch bs nbatch bsz"),
    Meaning("dropout", "p dp", r"drop|^p(attn|proj|resid)$|^(attn|attention|proj|resid|out)p$"),
    Meaning("bias", "", r"bias"),
    Meaning("kv_heads", "", r"kvhead|keyvaluehead"),
    Meaning("head_width", "", r"head\w*(dim|size|width)|(dim|size|width)\w*head"),
    Meaning("heads", "tou toushu"),
    Meaning("heads", "", r"num\w*head|^n\w*heads?$|n\w?heads?$|heads$|cabez|cabec|kopf|koepf|tetes|^teste$|headnum"),
    Meaning("context", "", r"(max|context|seq|block|ctx|position)\w*(len|size|window|embeddings)"),
    Meaning("width", "", r"emb(d|ed|$)|hid(d?e?n|$)|dmodel|modeldim|channels", r"vocab|num|layers|act|fn|eps|pos"),
    Meaning("width", "", r"(in|input|inputs|feature|query|key|value|kv)(dim|size|width|features|channels?|filters)$"),
    Meaning("width", "", r"^dim[a-z]|[a-z]dim$", r"ro[pt]|ff|mlp|low|rank|pos|rel|bott|axis|num|time|image|patch|conv"),
)  # fmt: skip

ARGUMENTS = (
    Meaning(
        "query",
        "q xq tgt qx inputq qinput target qin qs hq latents consulta anfrage abfrage requete "
        "pergunta domanda zapytanie sorgu vraag chaxun",
    ),
    Meaning(
        "key", "k xk kx inputk kinput kin ks hk clave chave schlussel schluessel cle chiave klucz anahtar sleutel jian"
    ),
    Meaning("value", "v xv vx inputv vinput vs vin hv wert werte wartosc deger waarde zhi"),
    Meaning(
        "memory",
        "c context encout y kv cond cross crossx mem xkv kvinput enc keyvalue keyvalues keyvaluestates contexts "
        "encoutput xcontext encoutputs keyvalueinput xenc encx enctensor keyvaluesource x2 xother "
        "laiyuan quelle fuente speicher kontext contexto contexte memoire memoria",
    ),
    Meaning("self", "", r"qkv"),
    Meaning("head_mask", "", r"heads?mask"),
    Meaning(
        "mask",
        "lengths seqlens bias attnbias attentionbias keypadding srclens klens",
        r"mas[kc]|masque|yanma|valid|pad(s|ding)?$|(key|kv|token|tok)s?(ok|keep|allowed|visible|present)$|^(keep|visible|allowed|present)$",
    ),
    Meaning(
        "self",
        "x input inputs hiddenstates embeddings embedding src embedded tokens seq hidden inp sequence inputtensor xs "
        "emb embeds embed data inputdata features hs hiddenstate source inputembeddings inputseq e z tensor "
        "inputembedding inputx inputsequence xin embs feats h batch idx states inputids encoderinput tokenembeddings "
        "inputsembeds layerinput entrada eingabe entree ingresso",
    ),
    Meaning("length", "tgtlen seqlen seqlength length len querylen qlen numtokens targetlen tgtlength sequencelength"),
    Meaning("rotary", "cos sin", r"^(freq|rope|rotary|positionembedding|posemb)"),
    Meaning("position", "", r"pos"),
    Meaning("cache", "", r"cache|past"),
    Meaning("query", "", r"quer|decod"),
    Meaning("key", "", r"key"),
    Meaning("value", "", r"val"),
    Meaning("memory", "", r"encod|memory"),
    Meaning("self", "", r"(embeds|features|feats|states)$"),
)

# Whole words and the value they usually have; the first that fits counts.
VALUES: tuple[tuple[str, Any], ...] = (
    (r"\w*theta|\w*base|\w*freq", ROTARY_BASE),
    (r"\w*eps(ilon)?", 1e-5),
    (r"(attn|attention)impl(ementation)?", "eager"),
    (r"(output|return|need)\w*(attn|attentions?|weights?|hidden\w*)", False),
    (r"usecache|isdecoder|(is)?training|inference|addcrossattention", False),
    (r"(is|use)?(causal|masked|mask)|(use)?flash(attn|attention)?|usesdpa", False),
    (r"(use)?(qk|qkv)?norm", False),
    (r"(src|tgt|source|target|n|num)?vocab(size)?", 50),
    (r"(n|num)(hidden|encoder|decoder|enc|dec)?(layers?|blocks?)|layers", 2),
    (r"layer(idx|id|index|identifier)?", 0),
    (r"layer(number|num)", 1),
    (r"device", "cpu"),
    (r"dtype|slidingwindow|ropescaling|activation|normlayer|quantconfig", None),
    (r"(d|dim|n)?(ff|ffn|mlp)(n|d|dim|size|hidden\w*)?|intermediate(size|dim)|(dim)?feedforward(dim|size)?", 64),
    (r"initializerrange|initstd", 0.02),
    (r"prunedheads", ()),
    (r"positionembeddingtype", "absolute"),
    (r"batchfirst", True),
    (r"name", "attention"),
    (r"startpos", 0),
    (r"(d|dim|q|kv|k|v)*(lora|latent|low|bottleneck)*rank", 12),
)
MEMORY_WIDTH = re.compile(
    r"(context|cross|memory|kv|cond|encoder|enc)(dim|size|width|attentiondim)|d(im)?(context|cross|memory)"
)
WEIGHTS_IN = Meaning(
    "weights",
    "wq wk wv wo wquery wkey wvalue wout qproj kproj vproj oproj outproj qprojweight kprojweight vprojweight "
    "oprojweight wqkv qweight kweight vweight oweight woutput wconcat wqs wks wvs wos",
).known


@functools.cache
def constructor_role(name: str) -> str | None:
    """What a constructor argument, configuration key or module constant means; None where its name does not say."""
    word = plain(name)
    exact = next((meaning.role for meaning in SETTINGS if word in meaning.known), None)
    return exact or next((meaning.role for meaning in SETTINGS if meaning.fits(word)), None)


@functools.cache
def call_role(name: str) -> str | None:
    """What an argument of `forward` means; None where its name does not say."""
    word = plain(name)
    return next((m.role for m in ARGUMENTS if word in m.known or m.fits(word)), None)


@functools.cache
def stream(word: str) -> str | None:
    """Whether this whole word, of three letters or more, means query, key or value, in any language."""
    known = (m for m in ARGUMENTS if m.role in ("query", "key", "value") and word in m.known)
    return next((m.role for m in known), None) if len(word) > 2 else None


@functools.cache
def has_usual_value(name: str) -> bool:
    """Whether something of this name usually has one value, such as `rope_theta` or `layer_idx`."""
    return any(re.fullmatch(pattern, plain(name)) for pattern, _ in VALUES)


@functools.cache
def usual_value(name: str) -> Any:
    """That value; None for other names."""
    return next((value for pattern, value in VALUES if re.fullmatch(pattern, plain(name))), None)


def is_configuration(name: str) -> bool:
    """Whether this is what people call a configuration."""
    return CONFIGURATION.fullmatch(plain(name)) is not None
