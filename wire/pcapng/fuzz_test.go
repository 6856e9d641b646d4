package pcapng

import (
	"bytes"
	"testing"
	"time"
)

// FuzzWriter writes any packet and reads the capture back.
func FuzzWriter(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 20}, "eth0", int64(1), uint16(0), uint8(0))
	f.Add(bytes.Repeat([]byte{0x60}, 70), "", int64(-1), uint16(64), uint8(1))
	f.Add([]byte(nil), "x", int64(1<<62), uint16(1), uint8(2))
	f.Fuzz(func(t *testing.T, ip []byte, name string, ns int64, snap uint16, id uint8) {
		var file bytes.Buffer
		w, err := NewWriter(&file, name, Interface{Name: name, SnapLen: int(snap)}, Interface{Description: name})
		if err != nil {
			t.Fatal(err)
		}
		out, at := id&4 != 0, time.Unix(0, ns&(1<<63-1))
		id &= 3
		err = w.Packet(int(id), at, out, ip)
		if (err == nil) != (id < 2) || (w.Stats(int(id), at, 7, 8) == nil) != (id < 2) {
			t.Fatalf("interface %d: %v", id, err)
		}
		c, err := Read(file.Bytes())
		if err != nil {
			t.Fatalf("what was written cannot be read: %v\n%x", err, file.Bytes())
		}
		if id >= 2 {
			return
		}
		eth := Ethernet(ip)
		frame := append(eth[:], ip...)
		kept := len(frame)
		if id == 0 && snap != 0 {
			kept = min(kept, int(snap))
		}
		kept = min(kept, DefaultSnapLen)
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
