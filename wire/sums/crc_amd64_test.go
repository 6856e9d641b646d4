//go:build !purego

package sums

import (
	"math/big"
	"math/bits"
	"testing"
)

// Every constant of the assembly is what the polynomial makes it.
func TestFoldConstants(t *testing.T) {
	poly := big.NewInt(0x104c11db7)
	// x returns x^n mod P, and number the quadword that stands for a polynomial.
	x := func(n uint) *big.Int {
		_, r := divide(new(big.Int).Lsh(big.NewInt(1), n), poly)
		return r
	}
	number := func(p *big.Int) uint64 {
		if p.BitLen() > 64 {
			t.Fatalf("%x does not fit", p)
		}
		return bits.Reverse64(p.Uint64())
	}
	move := func(n uint) [2]uint64 { return [2]uint64{number(x(n + 63)), number(x(n - 1))} }
	for _, tt := range []struct {
		bits uint
		have [2]uint64
	}{
		{2048, fold2048}, {1536, fold1536}, {1024, fold1024}, {512, fold512},
		{384, [2]uint64(foldLanes[0:])}, {256, [2]uint64(foldLanes[2:])}, {128, [2]uint64(foldLanes[4:])},
	} {
		if want := move(tt.bits); tt.have != want {
			t.Errorf("%d bits up: %#x, want %#x", tt.bits, tt.have, want)
		}
	}
	if [2]uint64(foldLanes[6:]) != [2]uint64{} {
		t.Errorf("the last lane is multiplied by %#x", foldLanes[6:])
	}
	quotient, _ := divide(new(big.Int).Lsh(big.NewInt(1), 95), poly)
	if want := [3]uint64{number(x(95).Lsh(x(95), 32)), number(quotient), number(poly.Lsh(poly, 31))}; reduce != want {
		t.Errorf("reduction: %#x, want %#x", reduce, want)
	}
	for i, v := range counting {
		if int(v) != i {
			t.Errorf("octet %d counts as %d", i, v)
		}
	}
}

// divide returns quotient and rest of two polynomials over two elements, whose
// coefficients are the bits.
func divide(a, b *big.Int) (quotient, rest *big.Int) {
	quotient, rest = new(big.Int), new(big.Int).Set(a)
	for d := rest.BitLen() - b.BitLen(); d >= 0; d = rest.BitLen() - b.BitLen() {
		quotient.SetBit(quotient, d, 1)
		rest.Xor(rest, new(big.Int).Lsh(b, uint(d)))
	}
	return quotient, rest
}
