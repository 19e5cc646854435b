"""Common English words of five letters."""

WORDS = tuple(
    """
    about above actor acute admit adopt adult after again agent agree ahead alarm album alert alike alive allow
    alone along alter amber angel anger angle angry ankle apart apple apply april arena argue arise armor array
    arrow aside asset attic audio audit avoid awake award aware bacon badge badly baker basic basin basis batch
    beach beard beast begin being below bench berry birth black blade blame blank blast blaze bleak blend bless
    blind block blood bloom blown board boast bonus boost booth bound boxer brain brake brand brass brave bread
    break brick bride brief bring brisk broad broke broom brown brush buddy build built bunch burnt cabin cable
    camel canal candy cargo carry carve catch cause cedar chain chair chalk charm chart chase cheap check cheek
    cheer chess chest chief child chill chimp china choir chose chunk cider civic civil claim clash class clean
    clear clerk click cliff climb cling clock close cloth cloud clown coach coast cocoa color comet comic coral
    couch cough could count court cover crack craft crane crash crawl crazy cream creek creep crest crime crisp
    cross crowd crown crude cruel crumb crush crust cubic curly curve cycle daily dairy daisy dance dealt death
    debut decay delay dense depth derby diary digit diner dirty ditch diver dizzy dodge donor doubt dough dozen
    draft drain drama drank drawn dream dress dried drift drill drink drive drown drums dusty dwarf eager eagle
    early earth easel eight elbow elder elect elite empty enemy enjoy enter entry equal error essay event every
    exact exile exist extra fable faint fairy faith false fancy fatal fault favor feast fence ferry fetch fever
    fiber field fiery fifth fifty fight final first flair flame flash fleet flesh flick float flock flood floor
    flour fluid flute focus foggy force forge forth forty forum found frame fraud fresh fried front frost frown
    fruit fully funny fuzzy gauge ghost giant given glade glare glass gleam glide globe gloom glory glove going
    grace grade grain grand grant grape graph grasp grass grave gravy great greed green greet grief grill grind
    groan groom group grove growl grown guard guess guest guide guilt habit handy happy harsh haste hatch haunt
    haven hazel heart heavy hedge hello hence heron hinge hobby holly honey honor horse hotel hound house hover
    human humor hurry ideal igloo image index inner input irony issue ivory jelly jewel joint jolly judge juice
    juicy jumbo kayak kiosk kneel knife knock known koala label labor lance large laser latch later laugh layer
    learn lease least leave ledge legal lemon level lever light lilac limit linen liver local lodge logic loose
    lorry loser lotus lover lower loyal lucky lunar lunch lyric magic major maker mango maple march marsh match
    mayor medal media melon mercy merge merit merry metal meter midst might miner minor minus mixed model moist
    money month moral motor motto mound mount mouse mouth movie muddy mural music naive nasty naval nerve never
    newly night noble noise north noted novel nurse nylon oasis occur ocean offer often olive onion opera orbit
    order organ other otter ought outer owner oxide paint panda panel panic paper party pasta patch pause peace
    peach pearl pedal penny perch phase phone photo piano piece pilot pinch pitch pizza place plain plane plank
    plant plate plaza plead pluck plumb plump point polar porch pouch pound power press price pride prime print
    prior prize probe proof proud prove proxy pulse pupil puppy purse queen query quest quick quiet quill quilt
    quite quota quote radar radio rainy raise rally ranch range rapid ratio raven reach react ready realm rebel
    refer relax relay reply rider ridge rifle right rigid rinse risky rival river roast robin robot rocky rodeo
    rough round route royal rugby ruler rumor rural rusty salad salon salty sandy sauce scale scare scarf scene
    scent scoop scope score scout scrap screw sedan sense serve seven shade shady shaft shake shall shame shape
    share shark sharp shave sheep sheet shelf shell shift shine shirt shock shoot shore short shout shown sight
    silly since siren skate skill skirt skull slate sleep slept slice slide slope small smart smell smile smoke
    snack snail snake sneak solar solid solve sonic sorry sound south space spare spark speak spear speed spell
    spend spice spicy spike spill spine spoke spoon sport spray squad stack staff stage stain stair stake stale
    stamp stand stare start state steak steal steam steel steep steer stern stick stiff still sting stock stone
    stood stool store storm story stove strap straw strip stuck study stuff stump style sugar suite sunny super
    surge swamp swarm sweat sweep sweet swept swift swing sword syrup table taken taste teach tempo tenor tenth
    thank theft their theme there these thick thief thing think third those three threw throw thumb tidal tiger
    tight timer tired title toast today token tooth topic torch total touch tough towel tower trace track trade
    trail train trait trash treat trend trial tribe trick tried troop trout truce truck truly trunk trust truth
    tulip twice twist uncle under union unite unity until upper upset urban usage usual vague valid value valve
    vapor vault verse video vigor villa vinyl viola virus visit vital vivid vocal voice voter wagon waist waste
    watch water weary weave wedge weigh weird whale wheat wheel where which while whirl white whole whose widen
    width windy witch woman world worry worse worst worth would wound woven wrist write wrong wrote yacht yearn
    yeast yield young youth zebra
    """.split()  # noqa: SIM905 - a list of a thousand literals is no better to read
)
