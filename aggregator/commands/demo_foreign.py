"""What the demo's queries in other languages and scripts are about.

Data only, as `demo_topics`; written for this project. Subjects are those of the English topics, so
that a multilingual model (not the demo's own, which is English) finds them beside each other.
"""

# ruff: noqa: RUF001 - letters of other scripts are the point

from __future__ import annotations

from aggregator.commands.demo_topics import lines, names

FOREIGN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "German": (
        names("""
            Sauerteigbrot, Apfelkuchen, Kopfschmerzen, Heuschnupfen, Bluthochdruck, Tomaten,
            Blattläuse, ein tropfender Wasserhahn, Schimmel im Bad, Lissabon, Island, eine
            Mondfinsternis, die Hanse, eine Wärmepumpe, Winterreifen
        """),
        lines("""
            {s} was hilft wirklich
            was muss man über {s} wissen
            {s} einfach erklärt für Anfänger
            welche Fehler macht man bei {s}
        """),
    ),
    "French": (
        names("""
            le pain au levain, la tarte aux pommes, la migraine, le rhume des foins, les tomates,
            les pucerons, un robinet qui fuit, Lisbonne, une éclipse de lune, les trous noirs,
            la Révolution française, un vélo électrique
        """),
        lines("""
            que faut-il savoir sur {s}
            {s} conseils pour débutants
            pourquoi {s} pose problème
            {s} avis et prix
        """),
    ),
    "Spanish": (
        names("""
            el pan de masa madre, la tortilla de patatas, el dolor de cabeza, la alergia al polen,
            los tomates, un grifo que gotea, Lisboa, un eclipse lunar, los agujeros negros,
            el Canal de Suez, una hipoteca, los murciélagos
        """),
        lines("""
            qué hay que saber sobre {s}
            {s} consejos para principiantes
            por qué es importante {s}
            cuánto cuesta {s}
        """),
    ),
    "Russian": (
        names("""
            хлеб на закваске, головная боль, аллергия на пыльцу, помидоры, протекающий кран,
            лунное затмение, чёрные дыры, ипотека, летучие мыши, электромобиль
        """),
        lines("""
            что нужно знать про {s}
            {s} советы для начинающих
            {s} простыми словами
        """),
    ),
    "Greek": (
        names("""
            το προζυμένιο ψωμί, ο πονοκέφαλος, η αλλεργία στη γύρη, οι ντομάτες, η έκλειψη σελήνης,
            οι μαύρες τρύπες, το στεγαστικό δάνειο
        """),
        lines("""
            τι πρέπει να ξέρω για {s}
            {s} συμβουλές για αρχάριους
        """),
    ),
    "Arabic": (
        names("""
            خبز العجين المخمر, الصداع النصفي, حساسية الربيع, الطماطم, خسوف القمر, الثقوب السوداء,
            القرض العقاري, السيارة الكهربائية
        """),
        lines("""
            ما الذي يجب معرفته عن {s}
            {s} نصائح للمبتدئين
            كم تكلفة {s}
        """),
    ),
    "Hindi": (
        names("""
            खट्टी रोटी, सिरदर्द, पराग एलर्जी, टमाटर के पौधे, चंद्र ग्रहण, ब्लैक होल, गृह ऋण,
            बिजली से चलने वाली कार
        """),
        lines("""
            {s} के बारे में क्या जानना चाहिए
            {s} शुरुआती लोगों के लिए सुझाव
        """),
    ),
    "Chinese": (
        names("""
            酸面包, 苹果派, 偏头痛, 花粉过敏, 高血压, 番茄, 蚜虫, 水龙头漏水,
            月食, 黑洞, 丝绸之路,
            房贷, 蝙蝠, 电动汽车
        """),
        lines("""
            {s}需要注意什么
            {s}怎么办
            为什么{s}这么重要
            {s}入门指南
        """),
    ),
    "Japanese": (
        names("""
            サワードウのパン, 偏頭痛, 花粉症, トマトの苗, 蛇口の水漏れ, 月食, ブラックホール,
            住宅ローン, コウモリ, 電気自動車
        """),
        lines("""
            {s}について教えてください
            {s}の原因と対策
            {s} 初心者
        """),
    ),
    "Korean": (
        names("""
            사워도우 빵, 편두통, 꽃가루 알레르기, 토마토, 월식, 블랙홀, 주택담보대출, 박쥐, 전기차
        """),
        lines("""
            {s} 에 대해 알아야 할 것
            {s} 초보자 추천
        """),
    ),
}
"""Language to (subjects, patterns)."""
