package rpcrdma

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
)

var unhex = vector.Hex

const (
	vecNullCall1 = "11223344000000010000002000000000000000000000000000000000112233440000000000000002" +
		"000186a3000000040000000000000000000000000000000000000000"
	vecNullCall2 = "11223344000000020000002000000000000000000000000000000000000000000000000011223344" +
		"0000000000000002000186a3000000040000000000000000000000000000000000000000"
	vecNullReply = "11223344000000020000002000000000000000010000000000000000000000000000000011223344" +
		"0000000100000000000000000000000000000000"
	vecVers11    = "11223344000000020000002000000004000000010000000100000001"
	vecVers12    = "11223344000000030000002000000004000000010000000100000002"
	vecBadXDR    = "1122334400000002000000200000000400000002"
	vecCantReply = "1122334400000002000000200000000400000003000000010000000200010000"
	vecInvalProc = "1122334400000002000000200000000400000004"
	vecInvalOpt  = "1122334400000002000000200000000400000005"
	vecOptional  = "112233440000000200000020000000050000000080000001" + "0000000568656c6c6f000000"
	vecChunks    = "11223344000000020000002000000000000000000a0b0c0d00000001000000440a0b0c0d00001000" +
		"00000000000010000000000000000001000000010a0b0c0e000020000000000000002000000000000000000100000001" +
		"0a0b0c0f000040000000000000003000"
)

// vecHeaders are whole messages, with the header and the payload they hold.
var vecHeaders = []struct {
	name    string
	hex     string
	h       Header
	payload string // hexadecimal
}{
	// V2-R1-5: XIDs of header and message are equal
	{"version one NULL call", vecNullCall1, Header{XID: 0x11223344, Vers: 1, Credit: 32}, vecNullCall1[56:]},
	// V2-5.2-15, V2-5.2-17, V2-5.2-14, V2-5.2-1
	{"NULL call", vecNullCall2, Header{XID: 0x11223344, Vers: 2, Credit: 32}, vecNullCall2[72:]},
	{"NULL reply", vecNullReply, Header{XID: 0x11223344, Vers: 2, Credit: 32, Direction: DirReply}, vecNullReply[72:]},
	// V2-5.2-9, V2-5.2-8, V2-5.2.4-3, V2-6.2-1
	{"ERR_VERS of a version one responder", vecVers11, Header{XID: 0x11223344, Vers: 2, Credit: 32,
		Proc: ProcERROR, Error: TransportError{Code: ErrVers, Low: 1, High: 1}}, ""},
	// V2-5.2.4-2: version three was asked for, and is copied
	{"ERR_VERS of a version two responder", vecVers12, Header{XID: 0x11223344, Vers: 3, Credit: 32,
		Proc: ProcERROR, Error: TransportError{Code: ErrVers, Low: 1, High: 2}}, ""},
	// V2-5.2-11, V2-5.2.1-2
	{"BAD_XDR", vecBadXDR, Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: ProcERROR,
		Error: TransportError{Code: ErrBadXDR}}, ""},
	// V2-5.2-10
	{"CANT_REPLY", vecCantReply, Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: ProcERROR,
		Error: TransportError{Code: ErrCantReply, Processed: true, SegmentIndex: 2, LengthNeeded: 65536}}, ""},
	{"INVAL_PROC", vecInvalProc, Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: ProcERROR,
		Error: TransportError{Code: ErrInvalProc}}, ""},
	{"INVAL_OPTION", vecInvalOpt, Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: ProcERROR,
		Error: TransportError{Code: ErrInvalOption}}, ""},
	// V2-5.2-12, V2-4.1-1, V2-4.1-2, V2-5.2-13
	{"OPTIONAL", vecOptional, Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: ProcOPTIONAL, OptType: 0x80000001,
		OptInfo: []byte("hello")}, ""},
	// V2-5.2-2, V2-5.2-3, V2-5.2-4, V2-5.2-5, V2-5.2-6, V2-5.2-7
	{"every list", vecChunks, Header{XID: 0x11223344, Vers: 2, Credit: 32, InvHandle: 0x0a0b0c0d,
		Reads:  []ReadSegment{{0x44, Segment{0x0a0b0c0d, 4096, 0x1000}}},
		Writes: []Chunk{{{0x0a0b0c0e, 8192, 0x2000}}},
		Reply:  Chunk{{0x0a0b0c0f, 16384, 0x3000}}}, ""},
}

func TestHeaderVectors(t *testing.T) {
	for _, tt := range vecHeaders {
		in := unhex(tt.hex)
		h, payload, err := ParseHeader(in)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		expect.Equal(t, hex.EncodeToString(payload), tt.payload, "%s: the payload", tt.name)
		if !reflect.DeepEqual(h, tt.h) {
			t.Errorf("%s:\n got %+v\nwant %+v", tt.name, h, tt.h)
		}
		out, err := tt.h.AppendBinary(nil)
		if err != nil {
			t.Errorf("%s: %v, when it is written", tt.name, err)
		}
		if out = append(out, payload...); !bytes.Equal(out, in) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, out, in)
		}
	}
}

func TestRPCVectors(t *testing.T) {
	call := RPCCall{XID: 0x11223344, Prog: 100003, Vers: 4}
	if got := call.Append(nil); hex.EncodeToString(got) != vecNullCall1[56:] || len(got) != 40 {
		t.Errorf("NULL call: %x", got)
	}
	got, args, err := ParseRPCCall(unhex(vecNullCall1[56:]))
	if err != nil {
		t.Errorf("NULL call: err is %v, want nil", err)
	}
	expect.Equal(t, len(args), 0, "NULL call: length of args")
	if !reflect.DeepEqual(got, RPCCall{XID: 0x11223344, Prog: 100003, Vers: 4, Cred: Auth{Body: []byte{}},
		Verf: Auth{Body: []byte{}}}) {
		t.Errorf("NULL call: got is %v, want %v", got,
			RPCCall{XID: 0x11223344, Prog: 100003, Vers: 4, Cred: Auth{Body: []byte{}}, Verf: Auth{Body: []byte{}}})
	}
	reply := RPCReply{XID: 0x11223344}
	if got := reply.Append(nil); hex.EncodeToString(got) != vecNullReply[72:] || len(got) != 24 {
		t.Errorf("NULL reply: %x", got)
	}
	for _, tt := range []struct {
		name string
		p    RPCReply
		want string // behind the XID and msg_type
	}{
		{"results", RPCReply{}, "00000000" + "0000000000000000" + "00000000"},
		{"versions of the program", RPCReply{Status: RPCProgMismatch, Low: 3, High: 4},
			"00000000" + "0000000000000000" + "00000002" + "0000000300000004"},
		{"garbage", RPCReply{Status: RPCGarbageArgs}, "00000000" + "0000000000000000" + "00000004"},
		{"verifier", RPCReply{Status: RPCSystemErr, Verf: Auth{6, []byte("abcde")}}, "00000000" + "0000000600000005" +
			"6162636465000000" + "00000005"},
		{"versions of RPC", RPCReply{Status: RPCMismatch, Low: 2, High: 2}, "00000001" + "00000000" + "0000000200000002"},
		{"authentication", RPCReply{Status: RPCAuthError, AuthStat: 5}, "00000001" + "00000001" + "00000005"},
	} {
		tt.p.XID = 7
		got := tt.p.Append(nil)
		if want := "0000000700000001" + tt.want; hex.EncodeToString(got) != want {
			t.Errorf("%s:\n got %x\nwant %s", tt.name, got, want)
		}
		p, results, err := ParseRPCReply(append(got, "res!"...))
		if len(p.Verf.Body) == 0 {
			p.Verf.Body = nil
		}
		if err != nil {
			t.Errorf("%s: err is %v, want nil", tt.name, err)
		}
		expect.Equal(t, string(results), "res!", "%s: results", tt.name)
		if !reflect.DeepEqual(p, tt.p) {
			t.Errorf("%s: p is %v, want %v", tt.name, p, tt.p)
		}
	}
}

func TestBadRPC(t *testing.T) {
	call := (&RPCCall{XID: 1, Prog: 2, Vers: 3, Proc: 4, Cred: Auth{1, make([]byte, 21)}}).Append(nil)
	reply := (&RPCReply{XID: 1, Status: RPCProgMismatch}).Append(nil)
	for n := range call {
		if _, _, err := ParseRPCCall(call[:n]); err == nil {
			t.Errorf("a call of %d of %d octets was read", n, len(call))
		}
	}
	for n := range reply {
		if _, _, err := ParseRPCReply(reply[:n]); err == nil {
			t.Errorf("a reply of %d of %d octets was read", n, len(reply))
		}
	}
	set := func(b []byte, word int, v uint32) []byte {
		b = bytes.Clone(b)
		copy(b[4*word:], appendU32(nil, v))
		return b
	}
	for _, tt := range []struct {
		name string
		err  error
		want Reason
	}{
		{"a reply read as a call", second(ParseRPCCall(reply)), ReasonRPC},
		{"RPC version 3", second(ParseRPCCall(set(call, 2, 3))), ReasonRPCVersion},
		{"a credential of 401 octets", second(ParseRPCCall(set(call, 7, 401))), ReasonBound},
		{"a credential without end", second(ParseRPCCall(set(call, 7, 400))), ReasonTruncated},
		{"a call read as a reply", second(ParseRPCReply(call)), ReasonRPC},
		{"reply_stat 2", second(ParseRPCReply(set(reply, 2, 2))), ReasonEnum},
		{"accept_stat 6", second(ParseRPCReply(set(reply, 5, 6))), ReasonRPC},
		{"reject_stat 2", second(ParseRPCReply(set(set(reply, 2, 1), 3, 2))), ReasonEnum},
	} {
		if e, ok := tt.err.(*Error); !ok || e.Reason != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, tt.err, tt.want)
		}
	}
}

func second[A, B any](_ A, _ B, err error) error { return err }
