package interop

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
	"ipoibcm/verbs"
)

// This file lets our own RPC-over-RDMA meet the kernel's NFS server.

// TestNFSProbe runs "ipoibcmd probe rpcrdma" against it: version two is offered
// and refused, version one settled on, and a NULL call answered.
func TestNFSProbe(t *testing.T) {
	w := openNFS(t)
	program := builtProgram(t, t.TempDir())
	type way struct{ name, addr, carrier string }
	ways := []way{{"RoCE/IPv4", guestIPv4, "roce"}, {"RoCE/IPv6", guestIPv6 + "%eth0", "roce"}}
	if nfs.siw == nil {
		ways = append(ways, way{"iWARP", guestIPv4, "iwarp"})
	}
	for _, tt := range ways {
		t.Run(tt.name, func(t *testing.T) {
			if tt.carrier == "iwarp" {
				w.judgeIWARP(t)
			} else {
				w.watch(t)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
			defer cancel()
			run := func(args ...string) (d control.RPCProbe) {
				t.Helper()
				c := exec.CommandContext(ctx, program,
					append([]string{"probe", "rpcrdma", tt.addr, "--transport", tt.carrier, "--pause", "500ms", "--json"}, args...)...)
				var out, complaints bytes.Buffer
				c.Stdout, c.Stderr = &out, &complaints
				if err := w.host.Start(c); err != nil {
					t.Fatal(err)
				}
				err := c.Wait()
				if jerr := json.Unmarshal(out.Bytes(), &d); err != nil || jerr != nil {
					t.Fatalf("%v, %v\n%s%s", err, jerr, &out, &complaints)
				}
				t.Logf("%s", &out)
				return d
			}
			d := run("--count", "3")
			expect.Equal(t, d.Outcome, "answered", "Outcome")
			expect.Equal(t, d.Offered, 2, "Offered")
			expect.Equal(t, d.Refused, 2, "Refused")
			expect.Equal(t, d.Agreed, 1, "Agreed")
			if d.Granted == 0 {
				t.Error("Granted is 0, want more")
			}
			expect.Equal(t, d.Status, "SUCCESS", "Status")
			expect.Equal(t, len(d.NullMS), 3, "length of NullMS")
			expect.Equal(t, len(d.Counters), 0, "length of Counters")
			// The kernel's message: 4096 octets both ways, and R not set.
			kernels := control.RPCPrivate{Hex: "f6ab0e1801000303", SendSize: 4096, RecvSize: 4096}
			expect.Equal(t, *d.Received, kernels, "private data of the kernel")
			expect.Equal(t, d.RemoteInv, false, "RemoteInv")
			expect.Equal(t, d.SendInline, 4096, "SendInline")
			expect.Equal(t, d.RecvInline, 4096, "RecvInline")
			d = run("--count", "1", "--send-size", "1024", "--receive-size", "2048", "--rpcrdma", "1")
			expect.Equal(t, d.SendInline, 1024, "small sizes: SendInline")
			expect.Equal(t, d.RecvInline, 2048, "small sizes: RecvInline")
			expect.Equal(t, d.Refused, 0, "small sizes: Refused")
			d = run("--vers-only")
			expect.Equal(t, d.Agreed, 1, "version only: Agreed")
			expect.Equal(t, len(d.NullMS), 0, "version only: length of NullMS")
		})
	}
}

// rpcEnd connects to the server, over iWARP if there is no family.
func rpcEnd(t *testing.T, w *world, fam *family, o rpcrdma.Options) *transport.End {
	t.Helper()
	o.Client = true
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	var e *transport.End
	if fam == nil {
		dev, err := softiwarp.Open(softiwarp.Options{Addr: netip.MustParseAddr(hostIPv4), Port: -1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dev.Close() })
		if e, err = transport.DialIWARP(ctx, dev, w.dial(nfsPort), transport.Options{RPC: o, Pause: breath}); err != nil {
			t.Fatal(err)
		}
	} else {
		w.watch(t)
		dev := w.device(t, softroce.Options{GID: fam.host})
		port, err := rdmacm.Open(rdmacm.Options{Provider: dev})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(port.Close)
		if e, err = transport.DialRoCE(ctx, port, fam.guest.Addr(), nfsPort,
			transport.Options{Provider: verbs.Provider(dev), RPC: o}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(e.Close)
	return e
}

// NFSv4 operations (RFC 7530, RFC 8881).
const (
	opLookup     = 15
	opPutRootFH  = 24
	opRead       = 25
	opExchangeID = 42
)

// xdrString is an opaque or a string with its padding.
func xdrString(s string) []byte {
	b := append(words(uint32(len(s))), s...)
	return append(b, make([]byte, -len(s)&3)...)
}

// compound is a COMPOUND call with AUTH_SYS credentials of root at "test".
func compound(minor uint32, ops int, body []byte) []byte {
	cred := append(words(0), xdrString("test")...)
	cred = append(cred, words(0, 0, 0)...)
	call := rpcrdma.RPCCall{Prog: nfsProgram, Vers: nfsVersion, Proc: 1, Cred: rpcrdma.Auth{Flavor: 1, Body: cred}}
	b := append(call.Append(nil), xdrString("")...)
	return append(append(b, words(minor, uint32(ops))...), body...)
}

// compoundReply takes the head off the results of a COMPOUND, whose status must be 0.
func compoundReply(t *testing.T, r transport.Reply, err error) []byte {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	head, b, err := rpcrdma.ParseRPCReply(r.Payload)
	if err != nil || head.Status != rpcrdma.RPCSuccess {
		t.Fatalf("%+v, %v", head, err)
	}
	if len(b) < 12 || !bytes.Equal(b[:8], make([]byte, 8)) {
		t.Fatalf("COMPOUND: %x", b)
	}
	return b[12:]
}

// numbers is what the file in the guest holds.
func numbers() []byte {
	var b bytes.Buffer
	for i := 100000; b.Len() < 300000; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.Bytes()[:300000]
}

// TestNFSCalls makes real NFSv4 calls of every form: EXCHANGE_ID, inline and, with
// little room for messages, by a Read chunk at position zero; a reply through
// the Reply chunk; and file data through a Write chunk, compared with the file.
func TestNFSCalls(t *testing.T) {
	w := openNFS(t)
	fams := w.families(t)
	ways := map[string]*family{"RoCE/IPv4": &fams[1], "RoCE/IPv6": &fams[0]}
	if nfs.siw == nil {
		ways["iWARP"] = nil
	}
	for name, fam := range ways {
		t.Run(name, func(t *testing.T) {
			wire := w.seg.Capture()
			ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
			defer cancel()
			e := rpcEnd(t, w, fam, rpcrdma.Options{SendSize: 1024})
			exchange := func(owner string) []byte {
				body := append(words(opExchangeID, 1, uint32(time.Now().UnixNano())), xdrString(owner)...)
				return compound(1, 1, append(body, words(0, 0, 0)...))
			}
			for what, tt := range map[string]struct {
				owner string
				max   int
			}{
				"inline":                          {"ipoibcm " + name, 500},
				"by a Read chunk":                 {strings.Repeat("o", 1000), 500},
				"answered through a Reply chunk":  {"ipoibcm 2 " + name, 9000},
				"both ways by chunks, and larger": {strings.Repeat("p", 1020), 30000},
			} {
				r, err := e.Call(ctx, rpcrdma.Submit{Payload: exchange(tt.owner), MaxReply: tt.max})
				b := compoundReply(t, r, err)
				// Its number, its status, the client ID that it gives, and so on.
				if len(b) < 40 {
					t.Errorf("EXCHANGE_ID %s: %d octets, want 40 at least: %x", what, len(b), b)
					continue
				}
				if want := words(opExchangeID, 0); !bytes.Equal(b[:8], want) {
					t.Errorf("EXCHANGE_ID %s: begins with %x, want %x", what, b[:8], want)
				}
				if binary.BigEndian.Uint64(b[8:]) == 0 {
					t.Errorf("EXCHANGE_ID %s: the client ID is 0, want another", what)
				}
			}
			i := e.Info()
			expect.Equal(t, i.Version, 1, "Version")
			expect.Equal(t, i.Refused, 2, "Refused")
			expect.Equal(t, i.SendInline, 1024, "SendInline")
			expect.Equal(t, i.RecvInline, 4096, "RecvInline")
			// Before the READs: it takes a reply whose data is in a Write chunk for all of it.
			got := nfsMessages(t, wire)
			if got != nil {
				all := strings.Join(got, "\n")
				for _, want := range []string{" MSG NFS 4 call 1", " MSG NFS 4 reply 1 accepted 0", " NOMSG"} {
					if !strings.Contains(all, want) {
						t.Errorf("tshark does not see %q in\n%s", want, all)
					}
				}
			}
			readNumbers(ctx, t, e)
			e.Close()
			e.Counters(func(name string, v uint64) {
				if name != "disconnected" && name != "version" {
					expect.Equal(t, v, 0, "%s", name)
				}
			})
		})
	}
}

// readNumbers reads parts of the file of numbers, small ones inline and larger ones by chunks.
func readNumbers(ctx context.Context, t *testing.T, e *transport.End) {
	t.Helper()
	file := numbers()
	for _, at := range []struct{ off, n int }{{0, 100}, {0, 5000}, {7, 4097}, {200000, 65536}, {299990, 100}} {
		body := words(opPutRootFH, opLookup)
		body = append(append(body, xdrString("numbers")...), words(opRead, 0, 0, 0, 0, 0, uint32(at.off), uint32(at.n))...)
		r, err := e.Call(ctx, rpcrdma.Submit{Payload: compound(0, 3, body), MaxReply: 200, Results: []int{at.n}})
		b := compoundReply(t, r, err)
		want := file[at.off:min(len(file), at.off+at.n)]
		eof := uint32(0)
		if at.off+at.n >= len(file) {
			eof = 1
		}
		head := words(opPutRootFH, 0, opLookup, 0, opRead, 0, eof, uint32(len(want)))
		if !bytes.HasPrefix(b, head) {
			t.Fatalf("READ of %d at %d: %x", at.n, at.off, b)
		}
		got := append(b[len(head):], bytes.Join(r.Results, nil)...)
		if at.n >= 4096 {
			expect.Equal(t, len(b)-len(head), 0, "READ of %d: octets inline", at.n)
			expect.Equal(t, len(r.Results), 1, "READ of %d: number of results", at.n)
		}
		if !bytes.HasPrefix(got, want) {
			t.Errorf("READ of %d at %d: %d octets, not those of the file", at.n, at.off, len(got))
		}
	}
}
