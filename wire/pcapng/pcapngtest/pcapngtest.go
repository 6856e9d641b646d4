// Package pcapngtest reads captures that package pcapng wrote, for tests. It knows no other
// captures, and no byte-swapped ones.
package pcapngtest

import (
	"encoding/binary"
	"fmt"
	"time"

	"ipoibcm/wire/pcapng"
)

// Block types and options (IETF opsawg draft).
const (
	blockSHB = 0x0a0d0d0a // section header
	blockIDB = 0x00000001 // interface description
	blockEPB = 0x00000006 // enhanced packet

	byteOrderMagic = 0x1a2b3c4d
	linkEthernet   = 1

	optEnd         = 0
	optSHBUserAppl = 4
	optIDBName     = 2
	optIDBDesc     = 3
	optIDBTSResol  = 9
	optEPBFlags    = 2
	tsresolNanos   = 9
	flagOutbound   = 2
)

// A Packet is one captured packet, as [Read] returns it.
type Packet struct {
	Interface int
	Time      time.Time // UTC
	Out       bool
	OrigLen   int    // octets on the wire, Ethernet header included
	Data      []byte // octets that were kept, Ethernet header included
}

// A Capture is a whole file.
type Capture struct {
	Application string
	Interfaces  []pcapng.Interface
	Packets     []Packet
}

// Read reads a capture: one section, little-endian, Ethernet. It skips blocks of other types. A
// file that ends inside a block is an error.
func Read(b []byte) (*Capture, error) {
	c := &Capture{}
	for first := true; len(b) > 0; first = false {
		if len(b) < 12 {
			return nil, short("block", 12, len(b))
		}
		typ, n := binary.LittleEndian.Uint32(b), int64(binary.LittleEndian.Uint32(b[4:]))
		if first != (typ == blockSHB) {
			return nil, bad("block", "type", uint64(typ))
		}
		if n < 12 || n%4 != 0 {
			return nil, bad("block", "length", uint64(n))
		}
		if int64(len(b)) < n {
			return nil, short("block", int(n), len(b))
		}
		if again := binary.LittleEndian.Uint32(b[n-4:]); int64(again) != n {
			return nil, bad("block", "second length", uint64(again))
		}
		if err := c.block(typ, b[8:n-4]); err != nil {
			return nil, err
		}
		b = b[n:]
	}
	return c, nil
}

// block reads the body of one block.
func (c *Capture) block(typ uint32, b []byte) error {
	fixed := map[uint32]int{blockSHB: 16, blockIDB: 8, blockEPB: 20}[typ]
	if len(b) < fixed {
		return short("block", fixed, len(b))
	}
	switch typ {
	case blockSHB:
		if m := binary.LittleEndian.Uint32(b); m != byteOrderMagic {
			return bad("section", "byte order", uint64(m))
		}
		return eachOption(b[fixed:], func(code uint16, v []byte) {
			if code == optSHBUserAppl {
				c.Application = string(v)
			}
		})
	case blockIDB:
		if l := binary.LittleEndian.Uint16(b); l != linkEthernet {
			return bad("interface", "link type", uint64(l))
		}
		i, resol := pcapng.Interface{SnapLen: int(binary.LittleEndian.Uint32(b[4:]))}, byte(6)
		err := eachOption(b[fixed:], func(code uint16, v []byte) {
			switch {
			case code == optIDBName:
				i.Name = string(v)
			case code == optIDBDesc:
				i.Description = string(v)
			case code == optIDBTSResol && len(v) == 1:
				resol = v[0]
			}
		})
		if err == nil && resol != tsresolNanos {
			return bad("interface", "time resolution", uint64(resol))
		}
		c.Interfaces = append(c.Interfaces, i)
		return err
	case blockEPB:
		id, kept := binary.LittleEndian.Uint32(b), int64(binary.LittleEndian.Uint32(b[12:]))
		if int64(id) >= int64(len(c.Interfaces)) {
			return bad("packet", "interface", uint64(id))
		}
		rest := b[fixed:]
		padded := (kept + 3) &^ 3
		if int64(len(rest)) < padded {
			return short("packet", int(padded), len(rest))
		}
		p := Packet{
			Interface: int(id), Time: readTime(b[4:]),
			OrigLen: int(binary.LittleEndian.Uint32(b[16:])), Data: rest[:kept],
		}
		err := eachOption(rest[padded:], func(code uint16, v []byte) {
			if code == optEPBFlags && len(v) == 4 {
				p.Out = v[0]&3 == flagOutbound
			}
		})
		c.Packets = append(c.Packets, p)
		return err
	}
	return nil
}

func readTime(b []byte) time.Time {
	ns := uint64(binary.LittleEndian.Uint32(b))<<32 | uint64(binary.LittleEndian.Uint32(b[4:]))
	return time.Unix(0, int64(ns)).UTC()
}

func eachOption(b []byte, f func(code uint16, v []byte)) error {
	for len(b) >= 4 {
		code, n := binary.LittleEndian.Uint16(b), int(binary.LittleEndian.Uint16(b[2:]))
		padded := 4 + (n+3)&^3
		if len(b) < padded {
			return short("option", padded, len(b))
		}
		if code == optEnd {
			return nil
		}
		f(code, b[4:4+n])
		b = b[padded:]
	}
	return nil
}

func short(what string, need, have int) error {
	return fmt.Errorf("pcapng %s: %d octets needed, %d there", what, need, have)
}

func bad(what, field string, v uint64) error {
	return fmt.Errorf("pcapng %s: %s cannot be %#x", what, field, v)
}
