package locksql

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"unsafe"
)

// The prefilter: it runs on every statement of the program, so it must cost what reading the text costs. It looks for
// one byte of the needle, the rarest in SQL, in both cases, eight bytes at a time: SWAR, a uint64 as eight lanes. Around
// each such byte the needle's first eight are compared at once. The worst text repeats the rarest byte only, and costs
// that comparison for each of its bytes: see BenchmarkMentions.

const (
	lanes = 0x0101010101010101
	highs = 0x8080808080808080
)

// needle is a word to find in any ASCII case.
type needle struct {
	word string // lower case
	at   int    // index of its rarest byte
	rare pattern
	head pattern // its first eight bytes
}

// pattern matches eight bytes x in either case when (x|fold)&mask == want.
type pattern struct{ fold, mask, want uint64 }

// advisory is in the name of every function of the family.
var advisory = newNeedle("advisory")

// byRarity holds the letters by how seldom they are in SQL, rarest first. What is not in it is taken for rarer.
const byRarity = "zqjkxvwyghfbpmculdnoairst_e"

// newNeedle makes a needle of a word that is not empty.
func newNeedle(word string) needle {
	n := needle{word: lower(word)}
	for i := range len(n.word) {
		if strings.IndexByte(byRarity, n.word[i]) < strings.IndexByte(byRarity, n.word[n.at]) {
			n.at = i
		}
	}
	for i := range 8 {
		n.rare.set(i, n.word[n.at])
		if i < len(n.word) {
			n.head.set(i, n.word[i])
		}
	}
	return n
}

// set makes lane i match the lower-case byte c.
func (p *pattern) set(i int, c byte) {
	if 'a' <= c && c <= 'z' {
		p.fold |= 0x20 << (8 * i)
	}
	p.mask |= 0xFF << (8 * i)
	p.want |= uint64(c) << (8 * i)
}

// zeros marks the zero lanes of y with their high bit. A lane above a zero one may be marked too, by the borrow; no zero
// lane is missed.
func zeros(y uint64) uint64 { return (y - lanes) & ^y & highs }

// in reports whether the needle is in s.
func (n *needle) in(s string) bool {
	b := unsafe.Slice(unsafe.StringData(s), len(s))
	fold, want := n.rare.fold, n.rare.want
	i := 0
	for ; i+32 <= len(b); i += 32 {
		c := b[i : i+32 : i+32]
		z0 := zeros((binary.LittleEndian.Uint64(c[0:8]) | fold) ^ want)
		z1 := zeros((binary.LittleEndian.Uint64(c[8:16]) | fold) ^ want)
		z2 := zeros((binary.LittleEndian.Uint64(c[16:24]) | fold) ^ want)
		z3 := zeros((binary.LittleEndian.Uint64(c[24:32]) | fold) ^ want)
		if z0|z1|z2|z3 != 0 && (n.near(b, i, z0) || n.near(b, i+8, z1) || n.near(b, i+16, z2) || n.near(b, i+24, z3)) {
			return true
		}
	}
	for ; i+8 <= len(b); i += 8 {
		if z := zeros((binary.LittleEndian.Uint64(b[i:i+8]) | fold) ^ want); z != 0 && n.near(b, i, z) {
			return true
		}
	}
	for i -= n.at; i+len(n.word) <= len(b); i++ {
		if n.matches(b, i) {
			return true
		}
	}
	return false
}

// near verifies the marks z for the bytes from b[i] on.
func (n *needle) near(b []byte, i int, z uint64) bool {
	for i -= n.at; z != 0; z &= z - 1 {
		at := i + bits.TrailingZeros64(z)>>3
		if at >= 0 && at+8 <= len(b) && (binary.LittleEndian.Uint64(b[at:])|n.head.fold)&n.head.mask != n.head.want {
			continue
		}
		if n.matches(b, at) {
			return true
		}
	}
	return false
}

// matches reports whether the needle is at b[i:].
func (n *needle) matches(b []byte, i int) bool {
	if i < 0 || i+len(n.word) > len(b) {
		return false
	}
	for j := range len(n.word) {
		if lowerByte(b[i+j]) != n.word[j] {
			return false
		}
	}
	return true
}
