"""What the demo's queries are about: topics, their subjects, and ways to ask about them.

Data only; `demo_queries` makes queries of it. All of it is written for this project. Several
subjects of a topic are near synonyms ("dripping tap", "leaky faucet"), so that the nearest
neighbours of a vector show meaning and not only shared words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One field of knowledge. `{s}` in a pattern stands for a subject.

    `keywords` make searches of a few words, `questions` whole questions, `endings` narrow a
    question down, `stories` precede a question in long queries.
    """

    subjects: tuple[str, ...]
    keywords: tuple[str, ...]
    questions: tuple[str, ...]
    endings: tuple[str, ...]
    stories: tuple[str, ...]


def lines(text: str) -> tuple[str, ...]:
    """One entry a line."""
    return tuple(line.strip() for line in text.strip().splitlines())


def names(text: str) -> tuple[str, ...]:
    """Entries between commas."""
    return tuple(" ".join(entry.split()) for entry in text.split(","))


TOPICS: dict[str, Topic] = {
    "kitchen": Topic(
        subjects=names("""
            sourdough bread, pizza dough, chicken curry, lentil soup, risotto, pancakes, crepes,
            roast potatoes, baked salmon, beef stew, apple pie, shortcrust pastry, hummus,
            chickpea salad, fried rice, ramen broth, pickled cucumbers, gherkins, tomato sauce,
            cheesecake, scrambled eggs, meringue, kimchi, sauerkraut
        """),
        keywords=names("""
            {s} recipe, easy {s}, vegan {s} recipe, {s} without eggs, leftover {s} ideas, {s}
            calories per serving, how to make {s}, quick {s} for two, can you freeze {s}, what to
            serve with {s}, how to season {s}, best flour for {s}
        """),
        questions=lines("""
            how do you make {s} from scratch
            how long does {s} keep in the fridge
            what goes well with {s}
            why does my {s} turn out too salty
            what spices do you put in {s}
            what is the best pan for {s}
            how much {s} per person for a party
            how to reheat {s} without drying it out
        """),
        endings=lines("""
            for six people
            without an oven
            on a small budget
            the day before guests come
            at high altitude
        """),
        stories=lines("""
            my oven runs hotter than the dial says and the last two attempts were burnt outside
            my sister can't eat gluten or milk and she is coming to dinner with her family
            i followed my grandmother's notes to the letter but she never wrote down any amounts
        """),
    ),
    "health": Topic(
        subjects=names("""
            migraine, tension headache, high blood pressure, hypertension, a sprained ankle,
            lower back pain, sciatica, hay fever, pollen allergy, insomnia, trouble sleeping,
            iron deficiency, anemia, heartburn, acid reflux, a sore throat, tonsillitis, sunburn,
            eczema, itchy dry skin, a stiff neck, vertigo, a pulled hamstring, chickenpox
        """),
        keywords=names("""
            {s} symptoms, {s} home remedies, {s} in children, causes of {s}, {s} treatment, {s}
            during pregnancy, how to treat {s}, what helps against {s}, is {s} contagious, when is
            {s} dangerous, how long does {s} last, foods to avoid with {s}
        """),
        questions=lines("""
            what causes {s}
            how long does {s} last
            what helps against {s} at night
            when should you see a doctor about {s}
            is {s} dangerous for older people
            can stress bring on {s}
            which foods make {s} worse
            is it safe to exercise with {s}
            what is the difference between {s} and a cold
        """),
        endings=lines("""
            in the first week
            without taking painkillers
            if you already take other tablets
            during pregnancy
            in a small child
        """),
        stories=lines("""
            it started three days ago after a long flight and gets worse whenever i sit down
            the pharmacist told me to wait for a week but it now wakes me up every night
            my father had the same thing at my age and it took the doctors months to find out
        """),
    ),
    "garden": Topic(
        subjects=names("""
            tomato plants, courgettes, zucchini, climbing roses, lavender, basil, strawberries,
            blueberry bushes, an apple tree, a fig tree, hydrangeas, tulip bulbs, a lawn,
            a compost heap, slugs, snails, aphids, greenfly, powdery mildew, moss in the grass,
            raised beds, a rain barrel, house plants, orchids
        """),
        keywords=names("""
            {s} care, {s} in pots, {s} in winter, best soil {s}, natural help with {s}, {s}
            planting calendar, when to plant {s}, how to water {s}, what to do about {s}, yellow
            leaves {s}, {s} on a balcony, best neighbours for {s}
        """),
        questions=lines("""
            when is the best time to deal with {s}
            how often should i water {s} in a hot summer
            what do you do about {s} in a wet summer
            what do yellow leaves on {s} mean
            which plants grow well next to {s}
            how do you protect {s} from frost
            how far apart should you put {s}
            what should a beginner know about {s}
        """),
        endings=lines("""
            on a shady balcony
            in heavy clay soil
            before the first frost
            without any chemicals
            in a very small garden
        """),
        stories=lines("""
            we moved into a house where nobody had touched the beds for at least ten years
            it rained for the whole of june and then we had no rain at all for seven weeks
            our balcony faces north and gets perhaps two hours of sun late in the afternoon
        """),
    ),
    "repairs": Topic(
        subjects=names("""
            a dripping tap, a leaky faucet, a blocked drain, a clogged sink, a running toilet,
            a squeaky door, creaking floorboards, peeling wallpaper, a cracked tile, mould in the
            bathroom, a noisy boiler, a cold radiator, a tripping fuse, a flickering light,
            a stuck window, a broken roller blind, a loose banister, damp in the cellar,
            a slow washing machine, a fridge that hums, a gap under the door, a scratched parquet
        """),
        keywords=names("""
            fix {s}, {s} repair cost, {s} plumber or electrician, tools for {s}, {s} landlord or
            tenant, how to fix {s}, what causes {s}, quick help for {s}, who pays for {s}, stop
            {s} from coming back, {s} do it yourself
        """),
        questions=lines("""
            how do i fix {s} myself
            what does it cost to have {s} repaired
            who pays for {s} in a rented flat
            is {s} something the insurance covers
            what causes {s} in an old house
            how urgent is {s}
            which tools do you need for {s}
            why does {s} keep coming back
        """),
        endings=lines("""
            without calling anyone
            if the building is from the fifties
            before the winter comes
            while we are on holiday
            with nothing but a screwdriver
        """),
        stories=lines("""
            the previous owner did most of the work himself and left us no drawings of any kind
            the man who came last month charged two hundred and a week later it was back again
            we only rent the place and the landlord has not answered a single letter since easter
        """),
    ),
    "travel": Topic(
        subjects=names("""
            lisbon, porto, kyoto, osaka, the scottish highlands, iceland, norway by train,
            the amalfi coast, sicily, patagonia, new zealand, vancouver, marrakesh, istanbul,
            the greek islands, crete, krakow, prague, the dolomites, the swiss alps, hanoi,
            mexico city, the canary islands, cape town
        """),
        keywords=names("""
            {s} in october, cheap hotels {s}, {s} with kids, weather {s}, things to do in {s}, {s}
            travel guide, how expensive is {s}, best month for {s}, where to stay in {s}, three
            days in {s}, is {s} safe at night, {s} without a car
        """),
        questions=lines("""
            what is the best month to visit {s}
            how many days do you need for {s}
            is {s} expensive for tourists
            do i need a visa for {s}
            how do you get around {s} without a car
            what should i not miss in {s}
            is {s} a good place to travel alone
            what food is {s} known for
            where is it quiet around {s}
        """),
        endings=lines("""
            with two small children
            in the low season
            for less than a thousand
            with a wheelchair
            on a first visit
        """),
        stories=lines("""
            we have ten days in early spring and would rather walk and eat well than see museums
            my parents are over seventy and don't like stairs but they love being near the water
            the cheap flight lands after midnight and the next train only leaves in the morning
        """),
    ),
    "sky": Topic(
        subjects=names("""
            the moon, saturn's rings, jupiter, mars, a solar eclipse, a lunar eclipse, comets,
            shooting stars, meteor showers, black holes, neutron stars, the milky way, the andromeda
            galaxy, dark matter, the big bang, the northern lights, aurora borealis, exoplanets,
            the international space station, a telescope mirror, gravitational waves, pluto
        """),
        keywords=names("""
            {s} facts, {s} tonight, {s} explained, {s} for kids, distance to {s}, {s} photos, how
            to photograph {s}, who discovered {s}, how old is {s}, when to see {s}, size of {s},
            what causes {s}
        """),
        questions=lines("""
            what do we know about {s}
            how do people measure the distance to {s}
            who first described {s}
            can you see {s} with the naked eye
            how do scientists study {s}
            what does {s} tell us about the universe
            when will we next see {s}
            what would happen to us without {s}
            how was {s} formed
        """),
        endings=lines("""
            from the southern hemisphere
            in simple words
            with ordinary binoculars
            from the middle of a city
            according to recent measurements
        """),
        stories=lines("""
            my daughter asked me at bedtime and i noticed that i could not explain it at all
            there was a documentary on the radio yesterday and i only caught the last minutes
            we are going to be in the desert far away from any town for two nights in august
        """),
    ),
    "history": Topic(
        subjects=names("""
            the roman republic, julius caesar, the black death, the plague in europe, the silk road,
            the french revolution, napoleon, the congress of vienna, the printing press, gutenberg,
            the industrial revolution, steam engines, the ottoman empire, the meiji restoration,
            the cold war, the berlin wall, the moon landing, apollo 11, the suez canal, vikings,
            the hanseatic league, ancient egypt, the inca empire, the great depression
        """),
        keywords=names("""
            {s} timeline, {s} summary, {s} causes and effects, {s} essay, books about {s}, {s}
            map, who started {s}, what ended {s}, when was {s}, films about {s}, museum about {s},
            why study {s}
        """),
        questions=lines("""
            when did {s} begin
            why was {s} so important
            who profited most from {s}
            how did {s} change everyday life
            what do historians disagree about with {s}
            what happened after {s}
            where can you still see traces of {s}
            which sources do we have about {s}
        """),
        endings=lines("""
            for people in the countryside
            in a few sentences
            compared with today
            outside of the big cities
            from the point of view of women
        """),
        stories=lines("""
            i have to give a talk of ten minutes at school and the teacher hates long lists of dates
            we found a box of letters in the attic and some of them seem to speak about that time
            the book i am reading takes it for granted that everybody knows the background
        """),
    ),
    "code": Topic(
        subjects=names("""
            a python list, a dictionary in python, a pandas dataframe, a sql join, a database index,
            a deadlock, a race condition, a memory leak, a docker container, a kubernetes pod,
            a git merge conflict, a rebase, a regular expression, an http 500 error, a timeout,
            a rest api, a message queue, a kafka topic, a consumer group, unit tests,
            a segmentation fault, a null pointer, unicode text, json files, a hash table
        """),
        keywords=names("""
            {s} example, {s} tutorial, debug {s}, {s} best practices, {s} performance, {s}
            interview questions, how to debug {s}, what causes {s}, when to use {s}, explain {s},
            how to test {s}, {s} in go or python
        """),
        questions=lines("""
            how do i debug {s}
            what is the point of {s}
            how do you explain {s} to a beginner
            why is {s} so slow
            what is a good alternative to {s}
            when should you avoid {s}
            how do i test code that has {s} in it
            what happens inside {s}
            how can i log what goes on in {s}
        """),
        endings=lines("""
            in production
            without restarting the server
            on windows
            with more than a million rows
            in an old code base
        """),
        stories=lines("""
            it works on my laptop every time but about once a day it fails on the build machine
            the person who wrote this left years ago and there is neither a comment nor a test
            the error message only shows up under load and never when i attach the debugger
        """),
    ),
    "money": Topic(
        subjects=names("""
            a mortgage, a home loan, a savings account, an index fund, an etf, government bonds,
            inflation, rising prices, compound interest, a credit card, an overdraft, income tax,
            a tax refund, a pension plan, retirement savings, life insurance, car insurance,
            a rental deposit, a pay rise, a salary negotiation, freelance invoices, student debt
        """),
        keywords=names("""
            {s} calculator, {s} explained, best {s} 2026, {s} pros and cons, {s} for beginners,
            how {s} works, is {s} worth it, how to compare {s}, when to cancel {s}, risks of {s},
            what does {s} cost, {s} after a divorce
        """),
        questions=lines("""
            what is the catch with {s}
            is {s} worth it
            what should i know before i think about {s}
            how much can you lose with {s}
            what happens to {s} when interest rates go up
            who gives honest advice about {s}
            how do i compare offers for {s}
            what are typical mistakes with {s}
        """),
        endings=lines("""
            in your thirties
            as a self-employed person
            with an irregular income
            shortly before retirement
            for a family with one salary
        """),
        stories=lines("""
            the bank wants an answer by friday and i don't understand half of what they sent me
            we both changed jobs this year and moved abroad for a few months in between
            my uncle left me some money on the condition that i do something sensible with it
        """),
    ),
    "animals": Topic(
        subjects=names("""
            cats, kittens, puppies, an old dog, guinea pigs, rabbits, hedgehogs, squirrels, owls,
            bats, honey bees, bumblebees, wasps, hornets, octopuses, whales, dolphins, sharks,
            emperor penguins, elephants, wolves, brown bears, monarch butterflies, swifts, swallows
        """),
        keywords=names("""
            {s} lifespan, {s} food, {s} sounds, {s} in the wild, baby {s}, how {s} sleep, what do
            {s} eat, how long do {s} live, where do {s} sleep, are {s} dangerous, how fast are
            {s}, how to help {s}
        """),
        questions=lines("""
            what do {s} eat
            how long do {s} live
            how do {s} find their way
            why do {s} make that noise
            how smart are {s} really
            where do {s} go in winter
            are {s} dangerous to people
            how do {s} look after their young
            what can i do to help {s} near my house
        """),
        endings=lines("""
            in a cold climate
            during the night
            if they are injured
            compared with their relatives
            in a city apartment
        """),
        stories=lines("""
            there is one that comes to our terrace every evening and looks at us through the glass
            my son found it under the hedge this morning and it does not seem to be afraid of us
            the neighbours say we should call somebody but nobody knows who would be in charge
        """),
    ),
    "wheels": Topic(
        subjects=names("""
            an electric car, a plug-in hybrid, winter tyres, snow tires, a flat tyre, brake pads,
            a dead car battery, engine oil, a timing belt, a bicycle chain, bike gears, an e-bike,
            a cargo bike, a bike helmet, a wall box, charging at home, a scooter, a camper van,
            a caravan, a used car, a second-hand bicycle, a driving licence, a roof box
        """),
        keywords=names("""
            {s} price, {s} test, {s} maintenance, {s} or leasing, best {s} for families, {s} legal
            requirements, what does {s} cost, when to replace {s}, how to choose {s}, how to
            insure {s}, clean {s} at home, is {s} worth the money
        """),
        questions=lines("""
            how long does {s} last
            what should i check before buying {s}
            how much does {s} cost per year
            can i do {s} myself at home
            how do you know {s} has to be replaced
            do i need special insurance for {s}
            which mistakes do people make with {s}
            what do mechanics recommend about {s}
        """),
        endings=lines("""
            for short trips in the city
            in very cold weather
            if you live on the fourth floor
            after twenty thousand kilometres
            with three children
        """),
        stories=lines("""
            i drive about forty kilometres a day and can only park in the street at night
            the garage gave me two quotes which differ by a factor of three for the same work
            it makes a grinding sound in the morning which goes away once everything is warm
        """),
    ),
    "music": Topic(
        subjects=names("""
            the guitar, the ukulele, the piano, a digital piano, the violin, the cello, the drums,
            the saxophone, choir singing, a church choir, jazz improvisation, blues scales,
            sight reading, music theory, perfect pitch, a metronome, bach fugues, mozart's operas,
            the beatles, techno, vinyl records, a record player, stage fright, songwriting
        """),
        keywords=names("""
            learn {s}, {s} for beginners, {s} lessons near me, {s} history, {s} exercises, famous
            {s} pieces, how to practise {s}, is {s} hard to learn, history of {s}, best songs for
            {s}, who invented {s}, start with {s} at fifty
        """),
        questions=lines("""
            how long does it take to get good at {s}
            is it too late to start with {s} at fifty
            what makes {s} so difficult
            who are the great names in {s}
            how often should you practise {s}
            what should i listen to first to understand {s}
            how much should i spend on {s}
            why do people love {s}
        """),
        endings=lines("""
            without a teacher
            in a flat with thin walls
            in half an hour a day
            for a child of seven
            if you can't read notes
        """),
        stories=lines("""
            i played as a child and gave it up at fifteen and now i have some evenings to myself
            our band meets once a fortnight in a cellar and none of us has ever had any lessons
            the concert last night moved me to tears and i would like to understand why it did
        """),
    ),
}

OPENINGS: tuple[str, ...] = lines("""
    hello everyone
    i hope this is the right place to ask
    sorry if this has been asked before
    i have read a lot about it but every page says something else
""")
"""What people write before a long question."""
