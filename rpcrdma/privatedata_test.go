package rpcrdma

import (
	"encoding/hex"
	"testing"

	"ipoibcm/internal/expect"
)

func TestPrivateDataVectors(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    PrivateData
		want string
	}{
		// 8797-4-5, 8797-4-6, 8797-4-7, 8797-4-9, 8797-4-10, 8797-8-1
		{"a client with R", PrivateData{true, 4096, 4096}, "f6ab0e1801010303"},
		{"a server without", PrivateData{false, 4096, 4096}, "f6ab0e1801000303"},
		// 8797-4.2-1, 8797-4.2-2: the ends of the range, and what is between steps
		{"least", PrivateData{false, 1024, 1024}, "f6ab0e1801000000"},
		{"most", PrivateData{false, 262144, 262144}, "f6ab0e180100ffff"},
		{"rounded down", PrivateData{false, 4097, 5119}, "f6ab0e1801000303"},
		{"above what can be said", PrivateData{false, 300000, 1 << 30}, "f6ab0e180100ffff"},
	} {
		got, err := tt.p.AppendBinary(nil)
		if err != nil || hex.EncodeToString(got) != tt.want {
			t.Errorf("%s: got %x (%v), want %s", tt.name, got, err, tt.want)
		}
	}
	// 8797-4.2-6: what cannot be announced is refused.
	for _, p := range []PrivateData{{false, 1023, 1024}, {false, 1024, 0}, {false, -1, 4096}} {
		if got, err := p.AppendBinary(nil); err == nil || len(got) != 0 {
			t.Errorf("%v was announced as %x", p, got)
		}
	}
}

func TestFindPrivateData(t *testing.T) {
	full := PrivateData{true, 4096, 8192}
	const msg = "f6ab0e1801010307"
	none := DefaultPrivateData()
	if none != (PrivateData{false, 1024, 1024}) {
		t.Fatalf("default: %v", none) // 8797-5.1-1, 8797-3.1-3
	}
	for _, tt := range []struct {
		name string
		in   string
		want PrivateData
		at   int
	}{
		// 8797-5.2-1, 8797-5-1: at any octet, between the data of others
		{"at 0", msg, full, 0},
		{"at 1", "00" + msg, full, 1},
		{"at 3", "f6ab0e" + msg, full, 3},
		{"at 4, behind enhanced MPA data", "c008c004" + msg, full, 4},
		{"at 36, behind the RDMA-IP header", "004062a4" + hex.EncodeToString(make([]byte, 32)) + msg, full, 36},
		// 8797-6-2: padding and later fields are not looked at
		{"octets behind it", msg + "ffffffff00", full, 0},
		// 8797-4-8, 8797-4.2-3
		{"reserved bits and R", "f6ab0e1801ff00ff", PrivateData{true, 1024, 262144}, 0},
		{"reserved bits without R", "f6ab0e1801feff00", PrivateData{false, 262144, 1024}, 0},
		// 8797-5.2-2, 8797-5.1-1
		{"nothing", "", none, -1},
		{"another protocol's", "000000480000fff4deadbeef", none, -1},
		{"another identifier", "f6ab0e1901010307", none, -1},
		// 8797-5.2-4, 8797-6-1: a version that is not known, and one that overruns the end
		{"version 0", "f6ab0e1800010307", none, -1},
		{"version 2", "f6ab0e1802010307", none, -1},
		{"version 255", "f6ab0e18ff010307", none, -1},
		{"in the last 4 octets", "00f6ab0e18", none, -1},
		{"in the last 5 octets", "00f6ab0e1801", none, -1},
		{"in the last 7 octets", "00f6ab0e18010103", none, -1},
		// 8797-5.2-3: the first that is good counts, and a bad one does not end the search
		{"two", msg + "f6ab0e1801000000", full, 0},
		{"good behind bad", "f6ab0e1802010307" + msg, full, 8},
		{"good inside bad", "f6ab0e18f6" + "f6ab0e1801010307", full, 5},
	} {
		got, at := FindPrivateData(unhex(tt.in))
		expect.Equal(t, got, tt.want, "%s: what is in %s", tt.name, tt.in)
		expect.Equal(t, at, tt.at, "%s: offset in %s", tt.name, tt.in)
	}
}

func TestInline(t *testing.T) {
	// 8797-4.2-4, 8797-4.2-5, 8797-3.1-1: a threshold for each direction, which both ends compute alike
	for _, tt := range []struct {
		name           string
		client, server PrivateData
		toServer       int
		toClient       int
	}{
		{"equal", PrivateData{SendSize: 4096, RecvSize: 4096}, PrivateData{SendSize: 4096, RecvSize: 4096}, 4096, 4096},
		{"each its own", PrivateData{SendSize: 65536, RecvSize: 2048}, PrivateData{SendSize: 8192, RecvSize: 16384},
			16384, 2048},
		// 8797-1-1: with a silent server both are the default
		{"silent server", PrivateData{SendSize: 65536, RecvSize: 65536}, DefaultPrivateData(), 1024, 1024},
		{"silent client", DefaultPrivateData(), PrivateData{SendSize: 4096, RecvSize: 4096}, 1024, 1024},
		{"both silent", DefaultPrivateData(), DefaultPrivateData(), 1024, 1024},
	} {
		send, recv := Inline(tt.client, tt.server)
		expect.Equal(t, send, tt.toServer, "%s: what the client sends", tt.name)
		expect.Equal(t, recv, tt.toClient, "%s: what the client receives", tt.name)
		send, recv = Inline(tt.server, tt.client)
		expect.Equal(t, send, tt.toClient, "%s: what the server sends", tt.name)
		expect.Equal(t, recv, tt.toServer, "%s: what the server receives", tt.name)
	}
}

// TestAnnouncedSizeHolds: 8797-4.2-2, 8797-4.2-4, 8797-4.2-5. A size that is no
// multiple of 1024 is announced rounded down, and the end that has it keeps to
// what it has announced: both ends find the same thresholds.
func TestAnnouncedSizeHolds(t *testing.T) {
	sizes := []int{0, 1024, 1025, 2047, 2048, 4095, 4096, 5000, 5120, 262143, 262144, 300000}
	decode := func(b byte) int { return 1024 * (1 + int(b)) }
	inRange := func(size int) bool { return size != 0 && size <= 262144 }
	for _, send := range sizes {
		for _, recv := range sizes {
			for _, client := range []bool{false, true} {
				c, err := NewConn(Options{MaxVersion: 1, SendSize: send, RecvSize: recv, Client: client})
				if err != nil {
					t.Fatal(err)
				}
				own := c.Private()
				c.Step(nil, t0, Connected{octets("f6ab0e18 01 00 ffff")}) // 256 KiB both ways
				i := c.Info()
				if want := decode(own[6]); i.SendInline != want {
					t.Errorf("send size %d is announced as %d octets, and %d are sent", send, want, i.SendInline)
				}
				if want := decode(own[7]); i.RecvInline != want {
					t.Errorf("receive size %d is announced as %d octets, and %d are expected", recv, want, i.RecvInline)
				}
				if inRange(send) {
					expect.Equal(t, decode(own[6]), send-send%1024, "what is announced of send size %d", send)
				}
				if inRange(recv) {
					expect.Equal(t, decode(own[7]), recv-recv%1024, "what is announced of receive size %d", recv)
				}
			}
		}
	}
}

// TestSilent: 8797-4-4, 8797-5.1-1. Where the private data has no room an end says
// nothing, and holds itself to what its peer must take it to have said: 1024 octets
// in both directions and no R, whatever it could do and whatever the peer says.
func TestSilent(t *testing.T) {
	for how := range 16 {
		bit := func(n int) bool { return how>>n&1 != 0 }
		o := Options{MaxVersion: 1, Silent: true, SendSize: 65536, RecvSize: 65536, Client: bit(0), RecvInv: bit(1),
			SendInv: bit(2)}
		c, err := NewConn(o)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Private(); len(got) != 0 {
			t.Errorf("%+v: private data %x", o, got)
		}
		peer := octets("f6ab0e18 01 01 ffff")
		if bit(3) {
			peer = nil
		}
		c.Step(nil, t0, Connected{peer})
		i := c.Info()
		if i.SendInline != 1024 {
			t.Errorf("%+v, peer %x: sends %d octets inline, want 1024", o, peer, i.SendInline)
		}
		if i.RecvInline != 1024 {
			t.Errorf("%+v, peer %x: expects %d octets inline, want 1024", o, peer, i.RecvInline)
		}
		if i.RemoteInv {
			t.Errorf("%+v, peer %x: replies may invalidate", o, peer)
		}
	}
}
