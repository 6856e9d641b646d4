package sums

import (
	"bytes"
	"math/bits"
	"math/rand/v2"
	"strconv"
	"testing"
)

// plain is RFC 1071 word by word.
func plain(sum uint32, b []byte) uint32 {
	s := uint64(sum)
	for i, v := range b {
		if i%2 == 0 {
			s += uint64(v) << 8
		} else {
			s += uint64(v)
		}
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return uint32(s)
}

// Sums that carry all the way, and the two zeros of one's complement.
func TestInternet(t *testing.T) {
	ones := bytes.Repeat([]byte{0xff}, 70000)
	zeros := make([]byte, 600)
	data := noise(70000 + 64)
	both(t, &canAdd, func(t *testing.T) {
		r := rand.New(rand.NewPCG(9, 10))
		check := func(sum uint32, b []byte, what string) {
			if got, want := Internet(sum, b), plain(sum, b); got != want {
				t.Fatalf("%d octets of %s from %#x: %#x, want %#x", len(b), what, sum, got, want)
			}
		}
		for _, n := range lengths() {
			at := r.IntN(64)
			check(r.Uint32(), data[at:at+n], "noise")
			check(r.Uint32N(1<<16), ones[:n], "ones")
		}
		for n := range 600 {
			for _, sum := range []uint32{0, 1, 0xfffe, 0xffff, 0x10000, 0xffff0000, 0xffffffff} {
				check(sum, ones[:n], "ones")
				check(sum, zeros[:n], "zeros")
			}
		}
		for at := range 64 {
			for n := range 300 {
				check(r.Uint32(), data[at:at+n], "noise at "+strconv.Itoa(at))
			}
		}
	})
}

func TestInternetAtPageEnd(t *testing.T) {
	checkAtPageEnd(t, func(b []byte) uint32 { return Internet(1, b) }, func(b []byte) uint32 { return plain(1, b) })
}

func TestInternetInPieces(t *testing.T) {
	data := noise(8191)
	want := plain(0, data)
	both(t, &canAdd, func(t *testing.T) {
		r := rand.New(rand.NewPCG(11, 12))
		for range 500 {
			sum, cuts := uint32(0), []int{}
			for left := data; len(left) > 0; {
				n := min(len(left), 2*r.IntN(750)) // all but the last are even
				sum, left, cuts = Internet(sum, left[:n]), left[n:], append(cuts, n)
			}
			if sum != want {
				t.Fatalf("pieces of %d octets: %#x, want %#x", cuts, sum, want)
			}
		}
	})
}

func TestInternetAllocates(t *testing.T) {
	both(t, &canAdd, func(t *testing.T) {
		var sum uint32
		if n := testing.AllocsPerRun(10, func() {
			var b [1448]byte // stays on the stack
			sum = Internet(sum, b[:])
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// Internet and the words of RFC 1071 agree over any octets, in one piece and in two.
func FuzzInternet(f *testing.F) {
	f.Add([]byte("\x00\x01\xf2\x03\xf4\xf5\xf6\xf7"), uint32(0), uint16(2)) // 0xddf2, RFC 1071 section 3
	f.Fuzz(func(t *testing.T, b []byte, sum uint32, cut uint16) {
		want := plain(sum, b)
		if got := Internet(sum, b); got != want {
			t.Fatalf("%x from %#x: %#x, want %#x", b, sum, got, want)
		}
		at := int(cut) % (len(b) + 1) &^ 1
		if got := Internet(Internet(sum, b[:at]), b[at:]); got != want {
			t.Fatalf("%x from %#x, cut at %d: %#x, want %#x", b, sum, at, got, want)
		}
		if got := fold(addWordsGo(uint64(bits.ReverseBytes32(sum)), b)); got != want {
			t.Fatalf("%x from %#x, without vectors: %#x, want %#x", b, sum, got, want)
		}
	})
}

func BenchmarkInternet(b *testing.B) {
	for _, n := range []int{20, 32, 40, 64, 128, 256, 1448, 65484} {
		data := noise(n + 2)[2:]
		b.Run(strconv.Itoa(n), func(b *testing.B) { bench(b, &canAdd, data, Internet) })
	}
}
