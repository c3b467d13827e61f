package locksql

import (
	"strings"
	"testing"
)

// tokens lists a text's tokens: the kind's letter and the text, or a punctuation character alone.
func tokens(text string, escapes bool) string {
	letters := map[kind]string{tIdent: "I", tQuoted: "Q", tString: "S", tBits: "B", tNumber: "N", tParam: "P", tCast: "C", tOp: "O", tOther: "X", tUnterminated: "U"}
	l := lexer{src: text, escapes: escapes}
	var list []string
	for {
		t := l.next()
		if t.kind == tEOF {
			return strings.Join(list, " ")
		}
		if s, ok := letters[t.kind]; ok {
			list = append(list, s+l.text(t))
		} else if string(rune(t.kind)) == l.text(t) {
			list = append(list, l.text(t))
		} else {
			list = append(list, "?"+l.text(t))
		}
		if t.kind == tUnterminated {
			if l.next().kind != tEOF {
				list = append(list, "and more")
			}
			return strings.Join(list, " ")
		}
	}
}

// TestLexer goes through the rules of scan.l.
func TestLexer(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", ""},
		// Space and comments.
		{" \t\n\r\f\v a", "Ia"},
		{"a--b\nc--d\re--f", "Ia Ic Ie"},
		{"a/*b*/c/**/d/*/ e */f/* /* */ */g", "Ia Ic Id If Ig"},
		{"a/* * / b */c", "Ia Ic"},
		{"a/*b/*c*/d", "Ia U"},
		{"a/*b*", "Ia U"},
		{"/*", "U"},
		{"a - - b", "Ia - - Ib"},
		{"a / * b", "Ia / * Ib"},
		{"a*/b", "Ia O*/ Ib"},

		// Identifiers.
		{"a A_1$ _x é \xff\x80 z@", "Ia IA_1$ I_x Ié I\xff\x80 Iz O@"},
		{"[`]{|}", "[ O` ] X{ O| X}"},
		{`"a" "a""b" "a`, `Q"a" Q"a""b" U"a`},
		{`"" "\" "a` + "\n" + `b"`, `Q"" Q"\" Q"a` + "\n" + `b"`},
		{`"a"` + "\n" + `"b"`, `Q"a" Q"b"`},
		{`"a"` + "\n'b'", `Q"a" S'b'`},
		{`U&"a" u&"b" U & "c" xU&"d"`, `QU&"a" Qu&"b" IU O& Q"c" IxU O& Q"d"`},
		{"e b x u n E", "Ie Ib Ix Iu In IE"},
		{"u&a u'a' ua'b' ua\"b\"", "Iu O& Ia Iu S'a' Iua S'b' Iua Q\"b\""},

		// Strings.
		{"'a' '' 'a''b' '\\' '\"'", "S'a' S'' S'a''b' S'\\' S'\"'"},
		{"'a\nb'", "S'a\nb'"},
		{"'a'\n'b'", "S'a'\n'b'"},
		{"'a' \t\n \r 'b'  'c'", "S'a' \t\n \r 'b' S'c'"},
		{"'a'--x'\n'b'", "S'a'--x'\n'b'"},
		{"'a'\n--x\n--y\n'b'", "S'a'\n--x\n--y\n'b'"},
		{"'a'--\n-'b'", "S'a' - S'b'"},
		{"'a' 'b'", "S'a' S'b'"},
		{"'a'/*\n*/'b'", "S'a' S'b'"},
		{"'a'\n/**/'b'", "S'a' S'b'"},
		{"'a'\n--x'b'", "S'a'"},
		{"'a'\n-1\n'b'", "S'a' - N1 S'b'"},
		{"'a'\nx-\n'b'", "S'a' Ix - S'b'"},
		{"'a'\n-", "S'a' -"},
		{"'a'\n", "S'a'"},
		{"'a'\n'b", "U'a'\n'b"},
		{"'a", "U'a"},
		{"'a''", "U'a''"},
		{"E'\\'' e'\\\\' E'a''b' E'\\'", "SE'\\'' Se'\\\\' SE'a''b' UE'\\'"},
		{"E'\\''\n'\\''", "SE'\\''\n'\\''"},
		{"E'\\", "UE'\\"},
		{"e 'a' xe'\\'", "Ie S'a' Ixe S'\\'"},
		{"b'01' B'' X'1F' x'", "Bb'01' BB'' BX'1F' Ux'"},
		{"b'0'\n'1'", "Bb'0'\n'1'"},
		{"N'a' n'b'", "IN S'a' In S'b'"},
		{"U&'a' u&'b''c'", "SU&'a' Su&'b''c'"},
		{"U&'a' UESCAPE '!' , 'b'", "SU&'a' UESCAPE '!' , S'b'"},
		{"U&\"a\" uescape\nE'!' x", "QU&\"a\" uescape\nE'!' Ix"},
		{"U&'a' uescape U&'!'", "SU&'a' Iuescape SU&'!'"},
		{"U&'a' uescape \"!\"", "SU&'a' Iuescape Q\"!\""},
		{"U&'a' uescapes '!'", "SU&'a' Iuescapes S'!'"},
		{"U&'a' \"uescape\" '!'", "SU&'a' Q\"uescape\" S'!'"},
		{"'a' uescape '!' \"a\" uescape '!' unknown uescape '!'", "S'a' Iuescape S'!' Q\"a\" Iuescape S'!' Iunknown Iuescape S'!'"},

		// Dollar quoting and parameters.
		{"$$$$ $$a$$ $$a$b$$", "S$$$$ S$$a$$ S$$a$b$$"},
		{"$a$ $b$ $$ $a$ $é_1$x$é_1$", "S$a$ $b$ $$ $a$ S$é_1$x$é_1$"},
		{"$a$b$a $a$", "S$a$b$a $a$"},
		{"$$a", "U$$a"},
		{"$a$b$A$", "U$a$b$A$"},
		{"a$$b$$ $1a$ $12$a$x$a$", "Ia$$b$$ P$1 Ia$ P$12 S$a$x$a$"},
		{"$ $a $a-$ $", "X$ X$ Ia X$ Ia - X$ X$"},
		{"$1$2", "P$1 P$2"},

		// Numbers.
		{"1 12 1_2 1__2 1_ _1", "N1 N12 N1_2 N1 I__2 N1 I_ I_1"},
		{"1.5 .5 1. 1.a 1.5.6 ._5", "N1.5 N.5 N1. N1. Ia N1.5 N.6 . I_5"},
		{"1..10 1...5", "N1 O.. N10 N1 O.. N.5"},
		{"1e5 1E+5 1.5e-1 .5e1 1e 1e+ 1ea", "N1e5 N1E+5 N1.5e-1 N.5e1 N1 Ie N1 Ie + N1 Iea"},
		{"1e1_0 1_0.0_1 1._5", "N1e1_0 N1_0.0_1 N1. I_5"},
		{"0x1F 0XaG 0x_1 0x 0x_ 0xg", "N0x1F N0Xa IG N0x_1 N0 Ix N0 Ix_ N0 Ixg"},
		{"0o17 0O8 0b101 0B2 1x1 0x1.5", "N0o17 N0 IO8 N0b101 N0 IB2 N1 Ix1 N0x1 N.5"},
		{"1a 1'a' 1$1", "N1 Ia N1 S'a' N1 P$1"},

		// Operators and punctuation.
		{",()[].;:", ", ( ) [ ] . ; :"},
		{"(= )=1 [= .= ,= ;=", "( = ) = N1 [ = . = , = ; ="},
		{":: := : = :::", "C:: O:= : = C:: :"},
		{"+ - * / % ^ < > =", "+ - * / % ^ < > ="},
		{"~ ! @ # & | ` ?", "O~ O! O@ O# O& O| O` O?"},
		{"<=> == <= >= <> != => || ->> @-@", "O<=> O== O<= O>= O<> O!= O=> O|| O->> O@-@"},
		{"=- =+ *+- @- =@- <->- ++ +-+", "= - = + * + - O@- O=@- O<-> - + + + - +"},
		{"=-1 2*-1 1<-1", "= - N1 N2 * - N1 N1 < - N1"},
		{"+-*/ @--x", "O+-*/ O@"},
		{"+/*x*/- =--x\n+", "+ - = +"},
		{"@/*x*/ */**/*", "O@ * *"},
		{"+-/**/-+--\n-", "+ - - + -"},
		{"\x00\x01\\{}\x7f", "X\x00 X\x01 X\\ X{ X} X\x7f"},
	} {
		if got := tokens(tt.text, false); got != tt.want {
			t.Errorf("%q\n got %q\nwant %q", tt.text, got, tt.want)
		}
	}
	for _, tt := range []struct{ text, want string }{
		{"'\\'' '\\\\' '''\\''", "S'\\'' S'\\\\' S'''\\''"},
		{"'a'\n'\\''", "S'a'\n'\\''"},
		{"'\\'", "U'\\'"},
		{"\"\\\" U&\"\\\" U&'\\' b'\\' $$\\$$", "Q\"\\\" QU&\"\\\" SU&'\\' Bb'\\' S$$\\$$"},
		{"E'\\''", "SE'\\''"},
	} {
		if got := tokens(tt.text, true); got != tt.want {
			t.Errorf("standard_conforming_strings off: %q\n got %q\nwant %q", tt.text, got, tt.want)
		}
	}
}

func TestUnquote(t *testing.T) {
	for _, tt := range []struct{ literal, want string }{
		{"''", ""}, {"'a''b'", "a'b"}, {"'a\\b'", "a\\b"}, {"'a'\n'b'  --\n'''c'", "ab'c"},
		{"$$a'b$$", "a'b"}, {"$x$a$$b$x$", "a$$b"}, {"$$$$", ""},
		{"E'a''b\\'c'", "a'b'c"}, {`E'\b\f\n\r\t\v\a\\\"'`, "\b\f\n\r\t\va\\\""},
		{`E'\1\12\101\1018\400'`, "\x01\nAA8\x00"}, {`E'\2\3\4\5\6\7'`, "\x02\x03\x04\x05\x06\x07"}, {`E'\8\x\x4\x41\x411\X41'`, "8x\x04AA1X41"},
		{`E'\u0041\U00000042\u00e9\u00E9F'`, "ABééF"}, {`E'\uD83D\uDE00\U0001F600'`, "😀😀"},
		{"E'a\\''\n'\\'b'", "a''b"}, {"E'a\\\nb'", "a\nb"},
		{`"a""b"`, `a"b`}, {`"\"`, `\`},
		{`U&'\0041\+000042\\''\00e9'`, `AB\'é`}, {`U&'\D83D\DE00'`, "😀"}, {`u&"a""\0042"`, `a"B`}, {"U&'a'\n'\\0042'", "aB"},
		{`U&'!0041\!!' UESCAPE '!'`, `A\!`}, {`U&"z0041" uescape $$z$$`, "A"}, {`U&'d!0061' UESCAPE '!'`, "da"},
	} {
		l := lexer{src: tt.literal}
		tok := l.next()
		if got, ok := l.unquote(tok); !ok || got != tt.want || tok.end != len(tt.literal) {
			t.Errorf("%s: %q, %v, want %q", tt.literal, got, ok, tt.want)
		}
	}
	for _, refused := range []string{`E'\u004'`, `E'\U0000004'`, `E'\u'`, `U&'\004'`, `U&'\'`, `U&'\+00004'`, `U&'\+'`, `U&'\g'`, `U&'' UESCAPE 'ab'`, `U&'' UESCAPE ''`,
		`U&'' UESCAPE 'a'`, `U&'' UESCAPE '0'`, `U&'' UESCAPE ' '`, `U&'' UESCAPE '+'`, `U&'' UESCAPE ''''`, `U&'' UESCAPE '"'`, `U&'' UESCAPE E'\u'`} {
		l := lexer{src: refused}
		if got, ok := l.unquote(l.next()); ok {
			t.Errorf("%s: %q", refused, got)
		}
	}
	off := lexer{src: `'a\'b\x41'`, escapes: true}
	if got, _ := off.unquote(off.next()); got != "a'bA" {
		t.Errorf("standard_conforming_strings off: %q", got)
	}
	// Halves without the other half stay different.
	one, other := lexer{src: `U&'\D83D'`}, lexer{src: `U&'\D83E'`}
	a, _ := one.unquote(one.next())
	if b, _ := other.unquote(other.next()); a == b {
		t.Errorf("both %q", a)
	}
	for src, want := range map[string]string{`U&'\DE00\DE00'`: "\xed\xb8\x80\xed\xb8\x80", `U&'\0800\DE00'`: "\u0800\xed\xb8\x80"} {
		l := lexer{src: src}
		if got, _ := l.unquote(l.next()); got != want {
			t.Errorf("%s: %q", src, got)
		}
	}
}

func TestNames(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"AbC", "abc"}, {`"AbC"`, "AbC"}, {"ÄÉ", "ÄÉ"}, {"a[`@", "a"},
		{strings.Repeat("a", 70), strings.Repeat("a", 63)}, {`"` + strings.Repeat("A", 63) + `"`, strings.Repeat("A", 63)},
		{strings.Repeat("é", 40), strings.Repeat("é", 31)}, {`"` + strings.Repeat("\x80", 80) + `"`, ""},
	} {
		l := lexer{src: tt.text}
		if got := l.name(l.next()); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.text, got, tt.want)
		}
	}
}

func TestFold(t *testing.T) {
	for i := range 256 {
		c := byte(i)
		want := c
		if c >= 'A' && c <= 'Z' {
			want = c + 'a' - 'A'
		}
		if got := lower(string([]byte{c})); got != string([]byte{want}) {
			t.Errorf("%q: %q", c, got)
		}
	}
	for _, tt := range []struct {
		s, word string
		want    bool
	}{{"OFF", "off", true}, {"off", "off", true}, {"oft", "off", false}, {"of", "off", false}, {"offf", "off", false}} {
		if equalFold(tt.s, tt.word) != tt.want {
			t.Errorf("%s, %s", tt.s, tt.word)
		}
	}
}
