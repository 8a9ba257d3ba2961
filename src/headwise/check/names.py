"""What people call things: the meaning of a parameter, read from its name."""

import re

from headwise.check.sizes import Sizes


def _words(text: str) -> frozenset[str]:
    """A set of words, written as a sentence."""
    return frozenset(text.split())


WIDTH = _words(
    "dmodel embeddim embedsize embedim nembd nembed dim hiddensize hiddendim embdim embsize embeddingdim "
    "embeddingsize modeldim modelsize din dout infeatures outfeatures inputdim outputdim indim outdim channels "
    "features width dembed demb embed emb c d e dimin dimout dimmodel inputsize outputsize hidden nhidden nhid "
    "numhiddens attentiondim attentionsize dattn querysize keysize valuesize size nunits units nfeat nstate nx "
    "attndim dimembed "
    "embeddingdimension embeddingdims embeddims dmodels dimension embdsize embdim embddim dimembedding "
    "hiddendimension modeldimension inputdimension dinput doutput dinp inchannels outchannels featuredim "
    "dimfeatures nchannels allheadsize hiddenunits dimemb inputchannels contextdim crossdim dcontext "
    "crossattentiondim querydim innerdim totaldim qkvdim model embedding qsize embeddimension embeddingdepth "
    "featuresize fdim featdim dhidden hdim dimhidden encdim decdim dimquery inputembdim insize outsize "
    "dimmodel dmodelsize latentdim embdimension ninp inplanes encoderdim decoderdim"
)
HEADS = _words(
    "numheads nheads nhead heads h numattentionheads headnum headcount numhead nattnheads attentionheads "
    "numqueryheads nqheads nqueryheads numqheads nh head headsnum numberofheads nattentionheads headsnumber hnum "
    "attnheads numattnheads nbheads nbhead noheads nofheads numberheads nattentionhead numattentionhead "
    "attentionhead numsaheads mhaheads mhsaheads"
)
KV_HEADS = _words(
    "numkvheads nkvheads kvheads numkeyvalueheads nkvhead nkeyvalueheads numkvgroups nkvgroups kvhead "
    "numgroups ngroups groups numberofgroups numquerygroups nquerygroups querygroups groupnum numgroup"
)
HEAD_WIDTH = _words(
    "headdim dk dv dq headsize dimhead dhead keydim valuedim depth dimkey headwidth dimperhead sizeperhead "
    "headfeatures dkey dvalue dquery qkdim attnheadsize attentionheadsize dimq dimk dimv qdim kdim vdim headembdim "
    "headembeddim dimv dkv dqk sizehead headdimension perheaddim headchannels qkheaddim vheaddim dimvalue"
)
CONTEXT = _words(
    "contextlength blocksize maxseqlen maxlen seqlen ctxlen maxpositionembeddings nctx contextsize maxlength "
    "ctxsize maxseqlength sequencelength seqlength contextwindow maxcontext numtokens ntokens maxtokens context "
    "maxt npositions maxsequencelength contextlen sequencelen maxcontextlength blocklen tokens maxtokenlen "
    "seqlenmax maxctx maxseq maxcontextlen ctx windowsize numpatches npatches inputlength inputlen seqsize "
    "maxposition maxpositions maxbatchlen lookback maxseqsize maximumsequencelength"
)
BATCH = {"batchsize", "batch", "maxbatchsize", "bs", "nbatch", "bsz"}

QUERY = _words(
    "q query queries xq queryinput tgt qx inputq qinput queryinputs target inputquery xquery qin qs wquery hq"
)
KEY = _words("k key keys xk keyinput kx inputk kinput keyinputs inputkey xkey kin ks hk")
VALUE = _words("v value values val xv valueinput vx inputv vinput valueinputs inputvalue vs xvalue vin hv")
SELF = _words(
    "x input inputs hiddenstates embeddings embedding src embedded tokens seq hidden inp sequence inputtensor xs "
    "emb embeds embed data inputdata features hs hiddenstate source inputembeddings inputseq e z tensor "
    "inputembedding inputx inputsequence xin embs feats h batch idx states inputids encoderinput tokenembeddings "
    "inputsembeds"
)
MEMORY = _words(
    "context memory encoderoutput encoderoutputs encout y kv cond encoderhiddenstates cross crossx mem xkv "
    "kvinput enc encoderout keyvalue keyvalues keyvaluestates contexts encoutput xcontext encoderstates "
    "encoutputs keyvalueinput xenc encx enctensor keyvaluesource x2 xother srcencoded"
)
MASKS = {"lengths", "seqlens", "bias", "attnbias", "attentionbias", "keypadding", "srclens", "klens"}
LENGTHS = _words("tgtlen seqlen seqlength length len querylen qlen numtokens targetlen tgtlength sequencelength")
WEIGHTS_IN = {
    "wq": "q", "wk": "k", "wv": "v", "wo": "o", "wquery": "q", "wkey": "k", "wvalue": "v", "wout": "o",
    "qproj": "q", "kproj": "k", "vproj": "v", "oproj": "o", "outproj": "o", "qprojweight": "q", "kprojweight": "k",
    "vprojweight": "v", "oprojweight": "o", "wqkv": "qkv", "qweight": "q", "kweight": "k", "vweight": "v",
    "oweight": "o", "woutput": "o", "wconcat": "o", "wqs": "q", "wks": "k", "wvs": "v", "wos": "o",
}  # fmt: skip


def plain(name: str) -> str:
    """A name without case and underscores: `n_embd`, `nEmbd` and `N_EMBD` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def constructor_role(name: str) -> str | None:
    """What a constructor argument, configuration key or module constant means."""
    word = plain(name)
    for role, known in (
        ("heads", HEADS), ("kv_heads", KV_HEADS), ("head_width", HEAD_WIDTH), ("context", CONTEXT), ("width", WIDTH),
        ("batch", BATCH),
    ):  # fmt: skip
        if word in known:
            return role
    if "drop" in word or re.fullmatch(r"p|dp|p(attn|proj|resid)|(attn|attention|proj|resid|out)p", word):
        return "dropout"
    return _by_pieces(word)


def _by_pieces(word: str) -> str | None:
    """A guess from parts of a name nobody listed."""
    if "bias" in word:
        return "bias"
    if "kvhead" in word or "keyvaluehead" in word:
        return "kv_heads"
    if re.search(r"head\w*(dim|size|width)|(dim|size|width)\w*head", word):
        return "head_width"
    if re.search(r"num\w*head|n\w?heads?$|heads$", word):
        return "heads"
    if re.search(r"(max|context|seq|block|ctx|position)\w*(len|size|window|embeddings)", word):
        return "context"
    if re.search(r"emb(d|ed|$)|hid(d?e?n|$)|dmodel|modeldim|channels", word) and not re.search(
        r"vocab|num|layers|act|fn|eps|pos", word
    ):
        return "width"
    if re.search(r"(in|input|inputs|out|output|feature|query|key|value|kv)(dim|size|width|features|channels)$", word):
        return "width"
    return None


def value_for(role: str, sizes: Sizes) -> int | float | bool:
    """The value that a constructor argument of this meaning gets."""
    return {
        "width": sizes.E,
        "heads": sizes.H,
        "kv_heads": sizes.H,  # grouped heads then reduce to ordinary ones
        "head_width": sizes.D,
        "context": sizes.context,
        "dropout": 0.0,
        "bias": True,
        "batch": sizes.B,
    }[role]


def call_role(name: str) -> str | None:
    """What an argument of `forward` means."""
    word = plain(name)
    for role, known in (("query", QUERY), ("key", KEY), ("value", VALUE), ("memory", MEMORY)):
        if word in known:
            return role
    if "qkv" in word:
        return "self"
    if "mask" in word or "valid" in word or re.search(r"pad(s|ding)?$", word) or word in MASKS:
        return "mask"
    if word in SELF:
        return "self"
    return _call_role_by_pieces(word)


def _call_role_by_pieces(word: str) -> str | None:
    if word in LENGTHS:
        return "length"
    if word in ("cos", "sin") or word.startswith(("freq", "rope", "rotary", "positionembedding", "posemb")):
        return "rotary"
    if "pos" in word:
        return "position"
    for piece, role in (
        ("quer", "query"),
        ("key", "key"),
        ("val", "value"),
        ("encod", "memory"),
        ("memory", "memory"),
        ("decod", "query"),
    ):
        if piece in word and "cache" not in word and "past" not in word and "mask" not in word:
            return role
    return None
