"""A third collection of answers, labelled after the last correction of the score and never used to correct it.

The result on these rows is the unbiased one: the score must not be corrected to fit them.
"""

from __future__ import annotations

# language → output, gold, right
WITNESS: dict[str, list[tuple[str, int, bool]]] = {
    "bn": [
        ("ধাপ ১: ১৬ - ৩ - ৪ = ৯\nধাপ ২: ৯ × ২ = ১৮\n\nঅতএব, জ্যানেট প্রতিদিন ১৮ ডলার আয় করেন।", 18, True),
        ("চূড়ান্ত উত্তর হচ্ছে **৩৬৬** টি ডাউনলোড।", 366, True),
        ("মোট দূরত্ব = ৩ × ৩ × ৬০ = ৫৪০ মিটার।", 540, True),
        ("তার বয়স ২৫ বছর। ১০ বছর পরে তার বয়স হবে ৩৫ বছর।", 25, False),
        ("উত্তর: ০.২৫ বা ২৫%", 25, True),
    ],
    "de": [
        (
            "### Schritt 1\n16 - 7 = 9\n\n### Schritt 2\n9 · 2 = 18\n\n### Antwort\nJanet verdient **18 Dollar**.",
            18,
            True,
        ),
        ("Sie haben insgesamt 1.430 g Zucker verbraucht, also 1,43 kg.", 1430, True),
        ("Daher muss er noch 45 Meilen fahren!", 45, True),
        ("Das Ergebnis: ca. 18,33 Dollar", 18, False),
        ("Ergebnis = 460 $", 460, True),
    ],
    "en": [
        ("To solve this, let x be the number of glasses: 8x + 8(0.6x) = 12.8x, and with x = 5 it is $64.", 64, True),
        ("#### $5,600.00", 5600, True),
        ("Thus, the final result is **5,600** miles (rounded to the nearest ten).", 5600, True),
        ("```python\nprint(9 * 2)\n```\nOutput: 18", 18, True),
        ("It takes him 4 hours, so he gets home at 8:00 PM. He drove for 45 miles in the last 1.5 hours.", 45, True),
    ],
    "es": [
        ("Paso 1: 16 - 3 - 4 = 9 huevos.\nPaso 2: 9 × $2 = $18.\n\n$$\\boxed{18}$$", 18, True),
        ("La respuesta final es 5600 kilómetros aproximadamente.", 5600, True),
        ("Resultado: 1.430 gramos", 1430, True),
        ("La edad de Carlos es 13 años (7 años más que hace 6).", 13, True),
        ("Necesita 12,5 horas", 125, False),
    ],
    "fr": [
        ("Étape 1 : 16 - 7 = 9.\nÉtape 2 : 9 x 2 = 18.\nJanet gagne 18 $ par jour au marché.", 18, True),
        ("Résultat : 5 600 km", 5600, True),
        ("Le total s'élève à 1 430 grammes, soit environ 1,4 kg.", 1430, True),
        ("La réponse est : 25 %", 25, True),
        ("Il faut 4 heures et 30 minutes.", 4, False),
    ],
    "ja": [
        ("ステップ1：16－3－4＝9\nステップ2：9×2＝18\n\n答え：$18", 18, True),
        ("合計で5,600kmになります。（往復）", 5600, True),
        ("正解は３６６回です！", 366, True),
        ("彼女は25歳です。10年後は35歳になります。", 25, True),
        ("答えは約18.3ドルです。", 18, False),
    ],
    "ru": [
        ("1) 16 - 3 - 4 = 9 (яиц)\n2) 9 * 2 = 18 (долларов)\nОтвет: 18 долларов в день.", 18, True),
        ("Итак, ему осталось проехать 45 миль.", 45, True),
        ("Ответ: 5\u00a0600 км", 5600, True),
        ("Ответ: 12,5", 125, False),
        ("Всего получается $460$ долларов.", 460, True),
    ],
    "sw": [
        ("Hatua ya 1: 16 - 3 - 4 = 9\nHatua ya 2: 9 * 2 = 18\n\nJibu: Janet hupata $18 kwa siku.", 18, True),
        ("Kwa hiyo jumla ni kilomita 5,600.", 5600, True),
        ("Jibu sahihi ni: **366**", 366, True),
        ("Alitumia shilingi elfu 70.", 70000, True),
        ("Jibu ni 12.5", 125, False),
    ],
    "te": [
        ("దశ 1: 16 - 3 - 4 = 9\nదశ 2: 9 × 2 = 18\n\nకాబట్టి ఆమె రోజుకు 18 డాలర్లు సంపాదిస్తుంది.", 18, True),
        ("సమాధానం: **366** డౌన్‌లోడ్‌లు", 366, True),
        ("మొత్తం దూరం 5,600 కి.మీ.", 5600, True),
        ("చివరి సమాధానం 12.5", 125, False),
        ("సమాధానం = 460 డాలర్లు", 460, True),
    ],
    "th": [
        ("ขั้นตอนที่ 1: 16 - 3 - 4 = 9\nขั้นตอนที่ 2: 9 × 2 = 18\n\nดังนั้นเจเน็ตได้เงินวันละ 18 ดอลลาร์", 18, True),
        ("คำตอบ คือ 366 ครั้ง", 366, True),
        ("รวมระยะทางทั้งหมด 5,600 กิโลเมตร", 5600, True),
        ("คำตอบคือ 12.5", 125, False),
        ("คำตอบที่ถูกต้องคือ 460 ดอลลาร์", 460, True),
    ],
    "zh": [
        ("第1步：16 - 3 - 4 = 9\n第2步：9 × 2 = 18\n\n因此，她每天赚 18 美元。", 18, True),
        ("正确答案是：**366** 次下载。", 366, True),
        ("总共是5600公里。", 5600, True),
        ("答案：约12.5", 125, False),
        ("综上所述，John 加班后的周薪为 $460 美元。", 460, True),
    ],
}
