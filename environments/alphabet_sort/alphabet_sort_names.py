"""First and last names, in plain Latin letters."""

FIRST_NAMES = tuple(
    """
    Aaron Ada Adam Agnes Alan Albert Alice Alma Amara Amir Amy Ana Andre Anita Anna Anton Arthur Asha Astrid Aurora
    Barbara Basil Beatrice Ben Bianca Boris Brian Bruno Camille Carla Carlos Carmen Cecil Celia Chen Chloe Clara Claude
    Cora Cyrus Dalia Daniel David Dev Diana Diego Dora Dylan Edgar Edith Eduardo Elena Eli Elsa Emil Emma Eric Esther
    Eva Farid Fatima Felix Fiona Flora Frank Freya Gabriel Gemma George Gloria Grace Greta Gustav Hana Hannah Harold
    Hassan Hazel Heidi Helen Henry Hiro Hugo Ian Ida Igor Ingrid Irene Iris Isaac Ivan Jack Jacob Jada James Jana Jasper
    Javier Jenna Joel Jonas Joyce Juan Judith Julia Kai Karen Karim Kate Keiko Kevin Klara Kofi Lars Laura Layla Leah
    Leila Leo Lewis Lily Linus Lorenzo Louise Lucas Luna Mabel Malik Marco Maria Martin Mateo Maya Mei Mia Milo Mira
    Mona Nadia Naomi Nathan Neil Nina Noah Nora Oliver Omar Oscar Otto Owen Pablo Paula Pedro Perry Petra Philip Priya
    Quentin Rachel Rafael Ravi Rita Robert Rosa Ruben Ruth Sam Sana Sara Simon Sofia Stella Sven Tara Tess Theo Tomas
    Uma Umar Vera Victor Vivian Walter Wanda Wendy Wren Xavier Yara Yusuf Yvonne Zane Zara Zoe
    """.split()  # noqa: SIM905 - a list of two hundred literals is no better to read
)

LAST_NAMES = tuple(
    """
    Abbott Acosta Adler Ahmed Akers Allen Alvarez Archer Ashby Aziz Bailey Baker Banks Barnes Becker Bell Berg Bishop
    Blake Bond Bowen Brandt Brooks Burke Byrne Cabrera Campos Carter Castro Chandra Clarke Cole Conti Cooper Cortez
    Costa Craig Cruz Dalton Das Davies Dean Delgado Dixon Doyle Drake Duarte Duncan Eaton Eklund Ellis Emery Engel Evans
    Farrell Ferrari Fischer Flynn Foley Forbes Foster Fox Franco Frost Fuchs Garcia Gibson Glover Gomez Grant Greene
    Griffin Gupta Hahn Hale Hansen Hardy Hayes Herrera Hill Hoffman Holt Horn Hughes Hussain Ibarra Ibsen Ingram Irwin
    Ishida Ito Jacobs Jain Jansen Jensen Jimenez Jordan Kane Kapoor Keller Kelly Khan Kim Klein Knight Koch Kovacs Kumar
    Lambert Lane Larsen Lee Lehmann Levy Lind Lopez Lowe Lynch Maddox Malone Mann Marsh Mason Mehta Mendez Meyer Miller
    Molina Moore Morgan Moss Munoz Nash Navarro Neri Newton Nguyen Nolan Norris Novak Oakley Obrien Ochoa Okafor Olsen
    Ortiz Osman Owens Palmer Park Patel Perez Peters Pham Porter Price Quinn Ramos Reed Reyes Rhodes Rios Rivera Rossi
    Rowe Ryan Saito Salazar Santos Sato Schmidt Shah Sharp Silva Singh Soto Stone Suzuki Tanaka Tate Torres Tran Tucker
    Turner Ueda Ulrich Underhill Valdez Vance Vargas Vega Vogel Wagner Walsh Ward Webb Weiss West White Wolfe Wong Wood
    Xu Yamada Yang Yates York Young Zamora Zeller Ziegler Zhang
    """.split()  # noqa: SIM905
)
