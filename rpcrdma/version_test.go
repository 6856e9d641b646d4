package rpcrdma

import (
	"bytes"
	"testing"

	"ipoibcm/internal/expect"
)

// TestUnspokenVersion: a server answers a version that it does not speak with
// ERR_VERS. To a client such a message is a reply that cannot be read: a
// backward call has the version of its own calls (V2-5.2.4-3, V2-R1-8,
// V2-R1-17), and a requester says nothing to a reply (V2-R1-6).
func TestUnspokenVersion(t *testing.T) {
	for _, tt := range []struct {
		name     string
		o        Options
		versions []uint32
		low      uint32
		high     uint32
	}{
		{"both versions", Options{}, []uint32{0, 3, 0xffffffff}, 1, 2},
		{"version one", Options{MaxVersion: 1}, []uint32{0, 2, 3}, 1, 1},
		{"version two", Options{MinVersion: 2}, []uint32{0, 1, 3}, 2, 2},
	} {
		for _, v := range tt.versions {
			for _, proc := range []uint32{0, 1, 5, 99} {
				w := up(t, tt.o, tt.o)
				c, s := w.client(), w.server()
				s.program = nil
				c.step(Submit{ID: 1, Payload: rpc(0)})
				own := bytes.Clone(c.lastSent())
				xid := wordAt(own, 0)
				in := words(xid, v, 9, proc, 1, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0)
				switch answer, calls, reason := c.hear(in); {
				case answer != "":
					t.Errorf("%s, a client hears version %d, procedure %d: answer is %q, want \"\"", tt.name, v, proc, answer)
				case calls != 0:
					t.Errorf("%s, a client hears version %d, procedure %d: calls is %v, want 0", tt.name, v, proc, calls)
				case reason != ReasonVersion:
					t.Errorf("%s, a client hears version %d, procedure %d: reason is %v, want %v", tt.name, v, proc, reason,
						ReasonVersion)
				}
				expect.Equal(t, len(c.done), 0, "%s, a client hears version %d: length of done", tt.name, v)
				expect.Equal(t, c.granted, 32, "%s, a client hears version %d: granted", tt.name, v)
				before := len(s.sends)
				s.step(Recv{Data: in})
				if n := len(s.sends) - before; n != 1 {
					t.Fatalf("%s, a server hears version %d: %d answers", tt.name, v, n)
				}
				if got, want := s.lastSent(), words(xid, v, 32, 4, 1, tt.low, tt.high); !bytes.Equal(got, want) {
					t.Errorf("%s, a server hears version %d:\n got %x\nwant %x", tt.name, v, got, want)
				}
				// An error of a version that is not spoken is answered by nobody.
				for _, e := range w.ends {
					if answer, _, _ := e.hear(words(xid, v, 9, 4, 2)); answer != "" {
						t.Errorf("%s: %s answers an error of version %d by %q", tt.name, e.name, v, answer)
					}
				}
			}
		}
	}
}

// TestRequesterSendsNoError: V2-R1-6. A client whose call is unanswered hears its
// reply with each word changed in turn, and cut at every octet. It says nothing,
// but for the two errors of version two that any receiver must send (draft
// section 5.2.4): to a procedure, and to an option, that it does not know.
func TestRequesterSendsNoError(t *testing.T) {
	for _, version := range []uint32{1, 2} {
		base := up(t, Options{MaxVersion: Version(version)}, Options{})
		base.server().program = nil
		base.client().step(Submit{ID: 1, Payload: rpc(0)})
		xid := wordAt(base.client().lastSent(), 0)
		good := words(xid, version, 32, 0)
		if version == 2 {
			good = append(good, words(1, 0)...)
		}
		good = append(good, words(0, 0, 0, xid, 1, 0, 0, 0, 0)...)
		var heard [][]byte
		for i := 0; i < len(good); i += 4 {
			for _, v := range []uint32{0, 1, 2, 3, 4, 5, 6, 64, 65, 0x80000000, 0xffffffff} {
				in := bytes.Clone(good)
				copy(in[i:], words(v))
				heard = append(heard, in)
			}
		}
		for n := range good {
			heard = append(heard, good[:n])
		}
		for _, in := range heard {
			w := up(t, Options{MaxVersion: Version(version)}, Options{})
			c := w.client()
			w.server().program, c.program = nil, nil
			c.step(Submit{ID: 1, Payload: rpc(0)})
			before := len(c.sends)
			c.step(Recv{Data: bytes.Clone(in)})
			var want []byte
			if len(in) >= 16 && version == 2 && wordAt(in, 1) == 2 {
				call := len(in) < 20 || wordAt(in, 4) != 1 // by rdma_direction
				switch proc := wordAt(in, 3); {
				case proc == 2 || proc == 3 || proc > 5:
					want = words(wordAt(in, 0), 2, 2, 4, 4)
				case proc == 5 && len(in) >= 28 && wordAt(in, 4) < 2 && wordAt(in, 6) == 0:
					want = words(wordAt(in, 0), 2, 2, 4, 5)
				case proc != 4 && call: // it is no reply any more
					want = words(wordAt(in, 0), 2, 2, 4, 2)
				}
			}
			var got []byte
			for _, s := range c.sends[before:] {
				got = append(got, s.Data...)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("version %d, heard %x: sent %x, want %x", version, in, got, want)
			}
		}
	}
}
