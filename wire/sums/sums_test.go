package sums

import (
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"strconv"
	"syscall"
	"testing"
)

// both runs a test with the assembly, where there is any, and without.
func both(t *testing.T, have *bool, test func(t *testing.T)) {
	if *have {
		t.Run("vector", test)
		defer func() { *have = true }()
		*have = false
	}
	t.Run("fallback", test)
}

// noise returns n octets that are the same in every run.
func noise(n int) []byte {
	b := make([]byte, n+8)
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b[:n]
}

// lengths are all up to 2100 octets, and some up to 70000.
func lengths() (all []int) {
	for n := range 2101 {
		all = append(all, n)
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		all = append(all, 2100+r.IntN(70000-2100))
	}
	return append(all, 4084, 4096, 65484, 65535, 65536, 70000)
}

// atPageEnd returns n octets behind which, and before which, there is nothing
// that may be read, and moves them to either edge.
func atPageEnd(t *testing.T, n int) (atStart, atEnd []byte) {
	page := syscall.Getpagesize()
	size := (n + page - 1) / page * page
	mem, err := syscall.Mmap(-1, 0, size+2*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Munmap(mem) })
	for _, wall := range [][]byte{mem[:page], mem[page+size:]} {
		if err := syscall.Mprotect(wall, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	mem = mem[page : page+size]
	return mem[:n:n], mem[size-n:]
}

func TestCRC32(t *testing.T) {
	data := noise(70000 + 64)
	both(t, &canFold, func(t *testing.T) {
		r := rand.New(rand.NewPCG(5, 6))
		check := func(crc uint32, p []byte, at int) {
			if got, want := CRC32(crc, p), crc32.Update(crc, crc32.IEEETable, p); got != want {
				t.Fatalf("%d octets at alignment %d from %#x: %#x, want %#x", len(p), at, crc, got, want)
			}
		}
		for _, n := range lengths() {
			at := r.IntN(64)
			check(r.Uint32(), data[at:at+n], at)
			check(0, data[at:at+n], at)
		}
		for at := range 64 {
			for _, n := range []int{FoldLen, 255, 256, 257, 511, 512, 1008, 4084, 4096} {
				check(r.Uint32(), data[at:at+n], at)
			}
		}
	})
}

// Nothing outside the input is read: there is no memory.
func TestCRC32AtPageEnd(t *testing.T) {
	checkAtPageEnd(t, func(b []byte) uint32 { return CRC32(1, b) },
		func(b []byte) uint32 { return crc32.Update(1, crc32.IEEETable, b) })
}

// checkAtPageEnd compares got with want at the start of memory and at its end.
func checkAtPageEnd(t *testing.T, got, want func([]byte) uint32) {
	const n = 2100
	atStart, atEnd := atPageEnd(t, n)
	data := noise(n)
	copy(atStart, data)
	for n := range n {
		if got, want := got(atStart[:n]), want(data[:n]); got != want {
			t.Fatalf("the first %d octets: %#x, want %#x", n, got, want)
		}
	}
	copy(atEnd, data)
	for at := range n {
		if got, want := got(atEnd[at:]), want(data[at:]); got != want {
			t.Fatalf("the last %d octets: %#x, want %#x", n-at, got, want)
		}
	}
}

func TestCRC32InPieces(t *testing.T) {
	data := noise(8192)
	want := crc32.ChecksumIEEE(data)
	both(t, &canFold, func(t *testing.T) {
		r := rand.New(rand.NewPCG(7, 8))
		for range 500 {
			crc, cuts := uint32(0), []int{}
			for left := data; len(left) > 0; {
				n := min(len(left), r.IntN(1500))
				crc, left, cuts = CRC32(crc, left[:n]), left[n:], append(cuts, n)
			}
			if crc != want {
				t.Fatalf("pieces of %d octets: %#x, want %#x", cuts, crc, want)
			}
		}
	})
}

func TestCRC32Allocates(t *testing.T) {
	data := noise(4096)
	both(t, &canFold, func(t *testing.T) {
		var sum uint32
		if n := testing.AllocsPerRun(10, func() { sum = CRC32(sum, data) }); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// CRC32 and hash/crc32 agree over any octets, in one piece and in two.
func FuzzCRC32(f *testing.F) {
	f.Add([]byte("123456789"), uint32(0), uint16(4)) // 0xcbf43926, the check value
	f.Fuzz(func(t *testing.T, p []byte, crc uint32, cut uint16) {
		want := crc32.Update(crc, crc32.IEEETable, p)
		if got := CRC32(crc, p); got != want {
			t.Fatalf("%x from %#x: %#x, want %#x", p, crc, got, want)
		}
		at := int(cut) % (len(p) + 1)
		if got := CRC32(CRC32(crc, p[:at]), p[at:]); got != want {
			t.Fatalf("%x from %#x, cut at %d: %#x, want %#x", p, crc, at, got, want)
		}
	})
}

func BenchmarkCRC32(b *testing.B) {
	for _, n := range []int{64, 96, 128, 192, 256, 384, 512, 1008, 1024, 4084, 4096, 65484} {
		data := noise(n + 3)[3:] // as payloads lie, in no alignment
		b.Run(strconv.Itoa(n), func(b *testing.B) { bench(b, &canFold, data, CRC32) })
	}
}

// bench measures sum over data with the assembly, where there is any, and without.
func bench(b *testing.B, have *bool, data []byte, sum func(uint32, []byte) uint32) {
	run := func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		var s uint32
		for b.Loop() {
			s = sum(s, data)
		}
	}
	if *have {
		b.Run("vector", run)
		defer func() { *have = true }()
		*have = false
	}
	b.Run("fallback", run)
}
