package mpa

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"ipoibcm/internal/expect"
)

// readCapture returns what each side wrote, TCP segment by TCP segment.
func readCapture(t *testing.T, name string) (client, server [][]byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "> "):
			client = append(client, unhex(line[2:]))
		case strings.HasPrefix(line, "< "):
			server = append(server, unhex(line[2:]))
		}
	}
	return client, server
}

// TestKernel plays both sides of connections of the Linux iWARP stack: our
// machines take what the kernel said and say the same, octet for octet.
func TestKernel(t *testing.T) {
	for _, tt := range []struct {
		file string
		opts Options // of both sides, as siw and rping chose them
	}{
		{"siw_rping_mpa.txt", Options{Negotiate: true, Depths: Depths{IRD: 1, ORD: 1}}},
		// siw offers Write and Read, and answers with Write.
		{"siw_rping_mpa_p2p.txt", Options{Negotiate: true, PeerToPeer: true, RTR: RTRWrite | RTRRead,
			Depths: Depths{IRD: 1, ORD: 1}}},
	} {
		t.Run(tt.file, func(t *testing.T) {
			client, server := readCapture(t, tt.file)
			i, req := asks(tt.opts)
			if !bytes.Equal(req, client[0]) {
				t.Errorf("request\n ours %x\nsiw's %x", req, client[0])
			}
			own := tt.opts
			own.RTR = RTRWrite
			r, acts, reply := answerTo(own, client[0])
			if _, ok := has[Accepted](acts); !ok || !bytes.Equal(reply, server[0]) {
				t.Errorf("reply\n ours %x\nsiw's %x", reply, server[0])
			}
			acts = i.Step(nil, t0, Recv{server[0]})
			up, ok := has[Established](acts)
			expect.MustEqual(t, ok, true, "ok")
			expect.MustEqual(t, up.Result.IRD, 1, "Result.IRD")
			expect.MustEqual(t, up.Result.ORD, 1, "Result.ORD")
			expect.MustEqual(t, up.Result.CRC, false, "Result.CRC")
			first := bytes.Join(client[1:], nil)
			var fr Framer
			if rtr, ok := acts[0].(SendRTR); ok != tt.opts.PeerToPeer {
				t.Errorf("%+v", acts)
			} else if ok { // 6581-9.2-12
				if b := fr.Append(nil, AppendRTR(nil, rtr.Type), nil); !bytes.HasPrefix(first, b) {
					t.Errorf("RTR\n ours %x\nsiw's %x", b, first[:len(b)])
				}
			}
			for k, side := range [][]byte{first, bytes.Join(server[1:], nil)} {
				var got []string
				var again []byte
				var d Deframer
				us, err := frames(&d, side, 100)
				if err != nil {
					t.Fatal(err)
				}
				for n, u := range us {
					s, err := ParseSegment(u)
					if err != nil {
						t.Fatal(err)
					}
					if k == 0 && n == 0 {
						wantActs(t, "first message", r.Step(nil, t0, FPDU{s}), "Established")
					}
					got = append(got, fmt.Sprintf("%v %d", s.Opcode, len(s.Payload)))
					again = fr.Append(again, s.AppendHeader(nil), s.Payload)
				}
				if !bytes.Equal(again, side) {
					t.Errorf("direction %d: written again it differs\n ours %x\nsiw's %x", k, again, side)
				}
				t.Logf("%d: %s", k, strings.Join(got, ", "))
			}
		})
	}
}
