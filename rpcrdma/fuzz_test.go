package rpcrdma

import (
	"bytes"
	"reflect"
	"testing"
)

// FuzzHeader: what can be read can be written, except what is never sent, and is
// then the same.
func FuzzHeader(f *testing.F) {
	for _, tt := range vecHeaders {
		f.Add(unhex(tt.hex))
	}
	f.Add(words(7, 1, 32, 2, 512, 4096, 0, 0, 0))
	f.Fuzz(func(t *testing.T, in []byte) {
		a, payload, err := ParseHeader(in)
		_ = a.String()
		if err != nil {
			if reasonOf(err) == ReasonNone {
				t.Fatalf("an error without a reason: %v", err)
			}
			return
		}
		switch {
		case len(a.Reads) > MaxSegments:
			t.Fatalf("beyond the bounds: Reads has %v elements, want at most %v", len(a.Reads), MaxSegments)
		case len(a.Writes) > MaxSegments:
			t.Fatalf("beyond the bounds: Writes has %v elements, want at most %v", len(a.Writes), MaxSegments)
		case len(a.Reply) > MaxSegments:
			t.Fatalf("beyond the bounds: Reply has %v elements, want at most %v", len(a.Reply), MaxSegments)
		case len(a.OptInfo) > MaxOptInfo:
			t.Fatalf("beyond the bounds: OptInfo has %v elements, want at most %v", len(a.OptInfo), MaxOptInfo)
		}
		if d, ok := a.MessageDirection(payload); ok && d > DirReply {
			t.Fatalf("%v: direction %v", &a, d)
		}
		if !a.HasHandle(a.InvHandle) && a.Direction == DirCall {
			a.InvHandle = 0 // a fault of the peer's that we do not repeat
		}
		out, err := a.AppendBinary(nil)
		if a.Proc == ProcMSGP || a.Proc == ProcDONE {
			if err == nil {
				t.Fatalf("%v was written", &a)
			}
			return
		}
		if err != nil {
			t.Fatalf("%v cannot be written: %v", &a, err)
		}
		b, rest, err := ParseHeader(append(out, payload...))
		switch {
		case err != nil:
			t.Fatalf("%v", err)
		case !bytes.Equal(rest, payload):
			t.Fatalf("rest is %x, want %x", rest, payload)
		case !reflect.DeepEqual(a, b):
			t.Fatalf("%+v, then %+v (%v)\n in %x\nout %x", a, b, err, in, out)
		}
	})
}

func FuzzPrivateData(f *testing.F) {
	f.Add(unhex("c008c004f6ab0e1801010303"))
	f.Add(unhex("f6ab0e18f6ab0e180101ff00ff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		p, at := FindPrivateData(in)
		switch {
		case at < 0 && p != DefaultPrivateData():
			t.Fatalf("p is %v, want %v", p, DefaultPrivateData())
		case at+PrivateDataLen > len(in) && at >= 0:
			t.Fatalf("at is %v of %d octets, want room for %d", at, len(in), PrivateDataLen)
		}
		out, err := p.AppendBinary(nil)
		switch q, at := FindPrivateData(out); {
		case err != nil:
			t.Fatalf("err is %v, want nil", err)
		case q != p:
			t.Fatalf("q is %v, want %v", q, p)
		case at != 0:
			t.Fatalf("at is %v, want 0", at)
		}
		if at >= 0 {
			want := bytes.Clone(in[at : at+PrivateDataLen])
			want[5] &= 1 // flags but R are not kept
			if !bytes.Equal(out, want) {
				t.Fatalf("%x was written as %x, want %x", in[at:at+PrivateDataLen], out, want)
			}
		}
	})
}

// FuzzRPC reads octets as a call and as a reply.
func FuzzRPC(f *testing.F) {
	f.Add(unhex(vecNullCall1[56:]))
	f.Add(unhex(vecNullReply[72:]))
	f.Add((&RPCReply{XID: 1, Status: RPCProgMismatch, Low: 1, High: 2}).Append(nil))
	f.Add((&RPCCall{XID: 1, Prog: 2, Vers: 3, Proc: 4, Cred: Auth{1, []byte("abc")}}).Append(nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		if c, args, err := ParseRPCCall(in); err == nil {
			d, again, err := ParseRPCCall(append(c.Append(nil), args...))
			switch {
			case err != nil:
				t.Fatalf("err is %v, want nil", err)
			case !reflect.DeepEqual(c, d):
				t.Fatalf("c is %v, want %v", c, d)
			case !bytes.Equal(args, again):
				t.Fatalf("args is %x, want %x", args, again)
			}
		}
		if p, results, err := ParseRPCReply(in); err == nil {
			q, again, err := ParseRPCReply(append(p.Append(nil), results...))
			switch {
			case err != nil:
				t.Fatalf("err is %v, want nil", err)
			case !reflect.DeepEqual(p, q):
				t.Fatalf("p is %v, want %v", p, q)
			case !bytes.Equal(results, again):
				t.Fatalf("results is %x, want %x", results, again)
			}
		}
	})
}
