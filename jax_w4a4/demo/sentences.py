"""English sentences for the demo: one set to measure, another to calibrate.

Written for this package, so they carry its licence.
"""

# Three sentences on one subject in each group: a sentence's nearest neighbour should be
# one of the other two. Lengths, registers and vocabulary vary on purpose.
GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "The ferry to the island was cancelled because of high winds.",
        "Strong gusts kept the boat in the harbour all morning.",
        "Passengers waited at the dock until the storm let the ship sail.",
    ),
    (
        "My grandmother bakes rye bread every Saturday.",
        "She kneads the dough by hand and leaves it to rise overnight.",
        "A sourdough starter needs flour, water and a warm kitchen.",
    ),
    (
        "The central bank raised interest rates by half a percentage point.",
        "Borrowing has become more expensive as policymakers fight inflation.",
        "Mortgage payments climbed again after the latest monetary tightening.",
    ),
    (
        "How do I reset the password of my account?",
        "I cannot log in because I forgot my login details.",
        "The recovery link in the email has expired, so please send me a new one.",
    ),
    (
        "A pack of wolves crossed the frozen river at dusk.",
        "Grey wolves hunt together and share the kill with their young.",
        "Biologists tracked the predators by their prints in the snow.",
    ),
    (
        "The striker scored twice in the final ten minutes.",
        "Our goalkeeper saved a penalty and kept us in the match.",
        "Thousands of fans sang as the football team lifted the cup.",
    ),
    (
        "Photosynthesis turns sunlight, water and carbon dioxide into sugar.",
        "Leaves look green because chlorophyll absorbs red and blue light.",
        "Plants release oxygen during the day as they build carbohydrates.",
    ),
    (
        "The surgeon replaced the damaged valve during open-heart surgery.",
        "After the operation the patient's pulse returned to normal.",
        "Doctors recommend regular check-ups for people with cardiac disease.",
    ),
    (
        "She plays the cello in the city's youth orchestra.",
        "The string quartet rehearsed the slow movement again and again.",
        "An audience of two hundred applauded the violin concerto.",
    ),
    (
        "The compiler reports a type error on line forty-two.",
        "This function crashes when the input list is empty.",
        "We found the bug by bisecting the commits of the last release.",
    ),
    (
        "The telescope captured light from a galaxy ten billion years old.",
        "Astronomers discovered a planet orbiting a distant red dwarf.",
        "On a clear night you can see the rings of Saturn from this hill.",
    ),
    (
        "Our train to Lisbon leaves from platform nine at half past six.",
        "Tickets for the night express are sold out until Sunday.",
        "The railway line along the coast reopened after two years of repairs.",
    ),
    (
        "The tenants have the right to thirty days' notice before eviction.",
        "According to the lease, the landlord must return the deposit.",
        "Rents in the old town have doubled within five years.",
    ),
    (
        "A volcano on the southern ridge erupted without warning.",
        "Ash and lava forced three villages to evacuate.",
        "Geologists recorded small earthquakes for weeks before the mountain blew.",
    ),
    (
        "The museum returned the stolen painting to the family.",
        "A forgotten portrait by the Dutch master was sold at auction.",
        "Restorers cleaned centuries of varnish off the canvas.",
    ),
    (
        "Voters rejected the proposed constitution by a narrow margin.",
        "The opposition leader conceded the election on television.",
        "Parliament will debate the new electoral law in autumn.",
    ),
    (
        "Add a pinch of salt and simmer the tomato sauce for an hour.",
        "The soup tastes better with fresh basil and a little garlic.",
        "Roast the peppers until their skin turns black, then peel them.",
    ),
    (
        "The battery of an electric car loses range in cold weather.",
        "A new charging station opened beside the motorway.",
        "Hybrid vehicles burn less petrol in city traffic.",
    ),
)

# Other subjects than above, so that calibration does not see what is measured.
CALIBRATION: tuple[str, ...] = (
    "The library closes at eight on weekdays and at noon on Saturdays.",
    "Please forward the signed contract to our legal department.",
    "Honeybees tell each other where flowers are by dancing.",
    "He repaired the old clock with a spring from a broken watch.",
    "Heavy rain flooded the cellar and ruined the carpets.",
    "What is the fastest way to learn a foreign language?",
    "The novel follows three generations of a fishing family.",
    "Two suspects were arrested after a robbery at the jeweller's shop.",
    "Carbon fibre is lighter than steel, yet far stiffer.",
    "In 1969 the first message was sent over a computer network.",
    "The children built a castle of sand below the lighthouse.",
    "Investors sold shares in the airline after it warned of losses.",
    "Vaccines train the immune system to recognise a virus.",
    "I would like to return these shoes; they are too small.",
    "The orchard smells of apples in the first week of October.",
    "A gradient points in the direction of steepest ascent.",
    "The mayor promised cleaner streets and safer playgrounds.",
    "Whales sing songs that travel hundreds of kilometres under water.",
    "Knit two, purl two, and repeat to the end of the row.",
    "The judge dismissed the case for lack of evidence.",
    "Bring a warm sleeping bag: nights in the desert are cold.",
    "Unemployment among young graduates fell for the third month in a row.",
    "The actor forgot his lines in the middle of the second act.",
    "A leaking pipe behind the wall caused the mould.",
    "Ancient Romans built roads that are still in use today.",
    "Turn left at the bakery and walk straight on to the bridge.",
    "The chess champion offered a draw after forty moves.",
    "Glaciers in the Alps are melting faster than predicted.",
    "Our dog barks whenever somebody rings the bell.",
    "The professor explained why the sum of the angles is 180 degrees.",
    "Sales of used furniture rose sharply during the summer.",
    "Sleep, exercise and a balanced diet lower blood pressure.",
)
