"""Words that change the meaning of a number next to them, in the eleven languages of MGSM. Data only.

Most tables have one line per language, in the order en, de, es, fr, ru, sw, bn, te, ja, zh, th. A line is a regular
expression; `any_word` joins them. A missing word may make a number misread, so add it even if the number stays unread.
"""

from __future__ import annotations

import unicodedata

OPERATORS = (
    "plus|minus|times|divided by|multiplied by|added to|subtracted from|less than|more than|of|out of|remainder",
    "plus|minus|weniger|mal|geteilt durch|durch|Rest",
    "más|menos|por|dividido (?:por|entre)",
    "plus|moins|fois|divisé par|multiplié par",
    "плюс|минус|умножить на|умноженное на|разделить на|делить на",
    "jumlisha|kujumlisha|ongeza|kuongeza|toa|kutoa|mara|(?:gawanya|kugawanya|gawa) (?:kwa|na)|zidisha (?:kwa|na)",
    "যোগ|প্লাস|বিয়োগ|মাইনাস|গুণ(?:ন)?|ভাগ|কে",
    "ప్లస్|మైనస్|ఇంటూ|కూడిక|ను",
    "足す|たす|引く|ひく|かける|掛ける|割る|わる",
    "加|减|減|乘以?|除以|加上|减去",
    "บวก|ลบ|คูณ|หาร(?:ด้วย)?",
)
"""Between two operands: 5 plus 13."""

EQUALS = (
    "equals|equal to",
    "gleich|ergibt|ergeben",
    "igual a",
    "égale?s? à",
    "равно|равен|равна",
    "sawa na",
    "সমান",
    "సమానం",
    "イコール",
    "等于|等於",
    "เท่ากับ",
)
"""Before the result of a calculation."""

RANGES = (
    "to|up to|through|or|nor",
    "bis|oder",
    "a|o|u|hasta",
    "à|ou|jusqu'à",
    "до|или",
    "hadi|mpaka|au",
    "থেকে|হতে|অথবা|বা|কিংবা",
    "నుండి|నుంచి|లేదా|లేక",
    "から|または|又は|もしくは|あるいは|か",
    "到|至|或者?",
    "ถึง|หรือ",
)
AND = ("and", "und", "y|e", "et", "и", "na", "এবং|ও|আর", "మరియు", "と", "和|与", "และ|กับ")
"""RANGES and AND join the ends of a range, or several answers."""

THEREFORE = (
    r"so|therefore|thus|hence|that is|i\.e\.",
    r"also|somit|daher|folglich|das heißt",
    r"entonces|por (?:lo )?tanto|o sea|es decir",
    r"donc|ainsi|soit|c'est-à-dire",
    r"значит|итак|таким образом|то есть",
    r"kwa hi[vy]o|hivyo(?: basi)?|yaani",
    "সুতরাং|অতএব|কাজেই|তাই|অর্থাৎ",
    "కాబట్టి|అందువల్ల|అంటే",
    "したがって|よって|だから|つまり",
    "所以|因此|因而|也就是|即",
    "ดังนั้น|เพราะฉะนั้น|หรือก็คือ",
)
"""Before a statement that follows from the previous one or repeats it."""

ROUNDED = (r"round\w*", r"(?:auf|ab)?gerundet", r"redonde\w*", r"arrondi\w*", r"округл\w*", r"kadiri\w*")
"""Between a number and what it is rounded to."""

BEFORE_NEGATED = (
    r"(?:not|\w+n't|cannot|never)(?: (?!more|less|fewer|over)[^\W\d]+){0,2}",
    r"nicht|kein\w*",
    r"no (?:es|son)|no",
    "n'est pas|pas|non",
    "не",
    "si|sio|siyo",
    "",
    "",
    "",
    "不是|并非|不等于",
    "ไม่ใช่|ไม่ได้",
)
AFTER_NEGATED = (
    "",
    "",
    "",
    "",
    "",
    "",
    "নয়",
    "కాదు",
    "で?は(?:な[いく]|ありません)|でなく|じゃ(?:な[いく]|ありません)",
    "",
    "",
)
"""A number that is denied."""

BEFORE_BOUND = (
    "less than|fewer than|more than|greater than|larger than|smaller than|than|over|under|above|below|between|past|"
    "quarter to|half to",
    "weniger als|mehr als|größer als|kleiner als|über|unter|zwischen",
    "menos de|más de|menor que|mayor que|más que|menos que|entre",
    "moins de|plus de|moins que|plus que|entre",
    "меньше|больше|более|менее|чем|свыше|между",
    "zaidi ya|chini ya|kuliko|kati ya|tarehe",
    "",
    "",
    "",
    "超过|不到|不足|少于|多于|大于|小于",
    "น้อยกว่า|มากกว่า|เกิน|ระหว่าง",
)
AFTER_BOUND = (
    "or (?:more|less|fewer)",
    "oder (?:mehr|weniger)|Uhr",
    "o más|o menos",
    "ou (?:plus|moins)",
    "или (?:больше|меньше|более|менее)",
    "au zaidi",
    "এর (?:বেশি|কম)|বেশি|কম",
    "కంటే (?:ఎక్కువ|తక్కువ)",
    "以上|以下|未満|より|超|弱|強",
    "以上|以下|以内|多个",
    "ขึ้นไป",
)
"""More or less than this number, or a time measured from it."""

BEFORE_MULTIPLE = (
    "twice|thrice|double|triple|half(?: of| as much as)?|(?:third|quarter|fifth|tenth)s? of|square root of|percent of",
    "Hälfte von|halb|Doppelte von|Dreifache von|doppelt so viel wie|Drittel von|Viertel von|Wurzel aus",
    "mitad de|doble de|triple de|tercio de|cuarto de|medio",
    "moitié de|double de|triple de|tiers de|quart de|demi",
    r"половин\w (?:от)?|удвоенн\w+|вдвое больше|втрое больше|треть (?:от)?|четверть (?:от)?|полтора|дважды",
    r"nusu (?:ya)?|robo (?:ya)?|theluthi (?:ya)?|mara (?:mbili|tatu|nne|\d+) (?:ya|zaidi ya)",
    "সাড়ে|সোয়া|পৌনে|দেড়|আড়াই",
    "",
    "√",
    "两倍的|一半的",
    "ครึ่งหนึ่งของ|ครึ่งของ|(?:สอง|สาม|สี่)เท่าของ",
)
AFTER_MULTIPLE = (
    "and (?:a|one) (?:half|third|quarter)|and three quarters|halves|thirds|quarters|squared|cubed|"
    "times (?:as|more|the)",
    r"einhalb|\w+tel|mal so",
    r"y medi[oa]|y cuarto|y un cuarto|veces",
    "et demie?|et quart|et un quart",
    "с половиной|с четвертью|раза? (?:больше|меньше)",
    "na nusu|na robo",
    "এর (?:দ্বিগুণ|তিনগুণ|চারগুণ|অর্ধেক)|গুণ|দ্বিগুণ|অর্ধেক|ভাগের",
    "న్నర|(?:కి|కు|ని|లో|లోని) (?:రెట్టింపు|సగం|మూడు రెట్లు|పావు)|రెట్లు|రెట్టింపు|సగం|వంతు",
    r"の ?\d+ ?倍|倍|の半分|半|割",
    r"的(?:\d|两|二|三|四)倍|倍|的一半|个?半",
    "ครึ่ง|เท่า",
)
"""A multiple or a fraction of this number, or half more than it."""

COMPOUND_UNITS = (
    r"hours?|hrs?|h|minutes?|mins?|feet|foot|ft|years?|months?|weeks?|days?|dollars?|pounds?|lbs?|miles?",
    r"Stunden?|Std|Jahre?|Monate?|Wochen?|Tage?",
    r"horas?|años?|meses|semanas?|días?",
    r"heures?|ans?|mois|semaines?|jours?",
    r"час(?:а|ов)?|ч|лет|год(?:а)?|дн(?:я|ей)",
    "saa|masaa|miaka|siku",
    "ঘন্টা|ঘণ্টা|দিন|বছর|মাস",
    "గంటలు?|గంటల|రోజులు?|సంవత్సరాల?|నెలలు?",
    "時間|時|年|月|日|分",
    "小时|小時|点|點|年|月|日|分",
    "ชั่วโมง|วัน|ปี|เดือน",
)
"""Between the two numbers of one quantity or date: 3 hours 20 minutes."""

MINUS = (
    "minus|negative", "minus|negativ", "", "", "минус", "hasi", "মাইনাস|ঋণাত্মক", "మైనస్|రుణ|ఋణ", "マイナス", "负|負", "ลบ",
)  # fmt: skip
MINUS_AFTER_IS = r"(?:^|(?<!\w)(?:es|est|son)|[=:]) *(?:menos|moins)"
"""At least is al menos and au moins, so these two are a sign only after a verb."""

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
"""Before the day: March 18, 2021."""

SCALES: dict[int, tuple[str, str]] = {
    12: (r"dozens?|dutzend|docenas?|douzaines?|дюжин[аы]?|dazeni", r"ডজন|డజన్(?:లు|ల)?|డజను|ダース|โหล"),
    100: (r"hundreds?|hundert|сот(?:ни|ен|ня)", r"শত(?!াংশ|করা)|শো(?![ঀ-৿])|వంద(?:లు|ల)?|百(?!分)|ร้อย(?!ละ)"),
    10**3: (
        r"thousands?|tausend|mil|mille|тыс(?:яч[аи]?)?|elfu|(?<=\d)k",
        r"হাজার|వేల(?!ం)|千(?![米克瓦卡焦帕赫伏])|พัน(?!ธ)",
    ),
    10**4: (r"", r"[万萬]|หมื่น"),
    10**5: (r"lakhs?|laki", r"লক্ষ(?!্)|লাখ|లక్ష(?!్)|แสน"),
    10**6: (
        r"million(?:en|s)?|mill(?:ón|ones)|mio|mln|млн|миллион(?:а|ов)?|milioni|(?<=\d)(?-i:M)",
        r"মিলিয়ন|మిలియన్|ล้าน",
    ),
    10**7: (r"crores?", r"কোটি|కోట్ల|కోటి"),
    10**8: (r"", r"[億亿]"),
    10**9: (r"milliarden?|milliards?|mrd|млрд|миллиард(?:а|ов)?|bilioni", r"বিলিয়ন|బిలియన్"),
}
"""After digits, by factor; words in Latin and Cyrillic, and in other scripts.

千米 is a kilometre, 千克 a kilogram, লক্ষ্য an aim, พันธุ์ a breed.
"""

SHORT_SCALES: dict[int, tuple[str, str]] = {10**9: (r"billions?", ""), 10**12: (r"trillions?", "兆")}
"""Their factors in English and Japanese. A German Billion is a million millions, and a Chinese 兆 may be one."""

UNREAD_SCALES = (r"[bt]rill?i[oó]n\w*|bill?i?[oó]n\w*|трлн|триллион\w*|quadrillions?|(?<=\d)(?-i:bn|B|T)", "兆")
"""Scales whose number is not read, except where `SHORT_SCALES` applies."""

SCALES_BEFORE = {12: "dazeni", 100: "(?-i:mia)", 10**3: "elfu", 10**5: "(?-i:laki)", 10**6: "milioni", 10**9: "bilioni"}
"""Swahili also puts them before the digits: elfu 70."""


def any_word(*tables: tuple[str, ...]) -> str:
    """A pattern for any word of these tables. Words of the first six languages are whole words."""
    spaced: list[str] = []
    unspaced: list[str] = []
    for table in tables:
        spaced += filter(None, table[:6])
        unspaced += filter(None, table[6:])

    alternatives = unspaced
    if spaced:
        whole_words = rf"(?<!\w)(?:{'|'.join(spaced)})(?!\w)"
        alternatives = [whole_words, *unspaced]
    return unicodedata.normalize("NFKC", f"(?:{'|'.join(alternatives)})")
