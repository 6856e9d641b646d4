package pcapng_test

import (
	"bytes"
	"testing"
	"time"

	"ipoibcm/wire/pcapng"
	"ipoibcm/wire/pcapng/pcapngtest"
)

// FuzzWriter writes any packet and reads the capture back.
func FuzzWriter(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 20}, "eth0", int64(1), uint16(0), uint8(0))
	f.Add(bytes.Repeat([]byte{0x60}, 70), "", int64(-1), uint16(64), uint8(1))
	f.Add([]byte(nil), "x", int64(1<<62), uint16(1), uint8(2))
	f.Fuzz(func(t *testing.T, ip []byte, name string, ns int64, snap uint16, id uint8) {
		out, at := id&4 != 0, time.Unix(0, ns&(1<<63-1))
		id &= 1
		file := pcapng.AppendHeader(nil, name)
		file = pcapng.AppendInterface(file, pcapng.Interface{Name: name, SnapLen: int(snap)})
		file = pcapng.AppendInterface(file, pcapng.Interface{Description: name})
		file = pcapng.AppendPacket(file, uint32(id), at, out, ip, len(ip), int(snap)*int(1-id))
		c, err := pcapngtest.Read(file)
		if err != nil {
			t.Fatalf("what was written cannot be read: %v\n%x", err, file)
		}
		eth := pcapng.Ethernet(ip)
		frame := append(eth[:], ip...)
		kept := len(frame)
		if id == 0 && snap != 0 {
			kept = min(kept, int(snap))
		}
		kept = min(kept, pcapng.DefaultSnapLen)
		if len(c.Packets) != 1 || len(c.Interfaces) != 2 {
			t.Fatalf("%d packets of %d interfaces", len(c.Packets), len(c.Interfaces))
		}
		switch p := c.Packets[0]; {
		case p.Interface != int(id):
			t.Fatalf("Interface is %v, want %v", p.Interface, int(id))
		case !bytes.Equal(p.Data, frame[:kept]):
			t.Fatalf("Data is %x, want %x", p.Data, frame[:kept])
		case p.OrigLen != len(frame):
			t.Fatalf("OrigLen is %v, want %v", p.OrigLen, len(frame))
		case !p.Time.Equal(at):
			t.Fatalf("Time.Equal(at) is false, want true")
		case p.Out != out:
			t.Fatalf("Out is %v, want %v", p.Out, out)
		}
	})
}
