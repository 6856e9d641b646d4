package rpcrdma

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func reasonOf(err error) Reason {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return ReasonNone
}

// words makes a message of 32-bit words.
func words(w ...uint32) []byte { return appendU32(nil, w...) }

// badHeaderCases are the cases of TestBadHeaders.
func badHeaderCases() []badHeaderCase {

	seg := []uint32{0xa, 64, 0, 0x1000}
	lists := func(head []uint32, more ...[]uint32) []byte {
		for _, m := range more {
			head = append(head, m...)
		}
		return words(head...)
	}
	v1, v2 := []uint32{7, 1, 32, 0}, []uint32{7, 2, 32, 0, 0, 0}
	var reads65, writes65, empty65, many33 []uint32
	for range 33 {
		many33 = append(many33, seg...)
	}
	for range MaxSegments + 1 {
		reads65 = append(append(reads65, 1, 0), seg...)
		writes65 = append(append(writes65, 1, 1), seg...)
		empty65 = append(empty65, 1, 0)
	}

	return []badHeaderCase{
		// V2-R1-7: nothing can be said of what is too short
		{"nothing", nil, ReasonShort},
		{"15 octets", make([]byte, 15), ReasonShort},
		{"version one, 24 octets", words(7, 1, 32, 0, 0, 0), ReasonShort},
		{"version one, unknown procedure, 24 octets", words(7, 1, 32, 9, 0, 0), ReasonShort},
		// V2-5.2.4-3: the version is looked at first
		{"version 0", words(7, 0, 32, 0), ReasonVersion},
		{"version 3, unknown procedure", words(7, 3, 32, 99), ReasonVersion},
		{"version 0xffffffff", words(7, 0xffffffff, 32, 0), ReasonVersion},
		// V2-5.2.4-4, V2-5.2-13: 2 and 3 are not version two's; V2-4-1: nor is
		// anything else that its XDR does not have
		{"MSGP in version two", words(7, 2, 32, 2), ReasonProc},
		{"DONE in version two", words(7, 2, 32, 3), ReasonProc},
		{"procedure 6", words(7, 2, 32, 6), ReasonProc},
		{"procedure 0xffffffff", words(7, 2, 32, 0xffffffff), ReasonProc},
		{"OPTIONAL in version one", words(7, 1, 32, 5, 0, 0, 0), ReasonProc},
		// V2-5.2-1, V2-5.2-7
		{"direction 2", words(7, 2, 32, 0, 2, 0, 0, 0, 0), ReasonEnum},
		{"direction 2 of OPTIONAL", words(7, 2, 32, 5, 2, 0, 0), ReasonEnum},
		{"a list starts with 2", lists(v2, []uint32{2, 0, 0}), ReasonEnum},
		// V2-5.2-11: no default arm
		{"error 0", words(7, 2, 32, 4, 0), ReasonEnum},
		{"error 6", words(7, 2, 32, 4, 6), ReasonEnum},
		{"error 3 in version one", words(7, 1, 32, 4, 3, 0, 0, 0), ReasonEnum},
		{"processed is 2", words(7, 2, 32, 4, 3, 2, 0, 0), ReasonEnum},
		{"error without a code", words(7, 2, 32, 4), ReasonTruncated},
		{"versions without end", words(7, 2, 32, 4, 1, 1), ReasonTruncated},
		// V2-5.2-18, V2-R1-11
		{"a chunk of 0xffffffff segments", lists(v2, []uint32{0, 1, 0xffffffff}), ReasonBound},
		{"a chunk of 64 segments in no octets", lists(v2, []uint32{0, 1, 64, 0, 0}), ReasonTruncated},
		{"65 segments to read", lists(v1, reads65, []uint32{0, 0, 0}), ReasonBound},
		{"65 chunks to write", lists(v2, []uint32{0}, empty65, []uint32{0, 0}), ReasonBound},
		{"65 segments to write", lists(v2, []uint32{0}, writes65, []uint32{0, 0}), ReasonBound},
		{"two chunks of 33 segments to write", lists(v2, []uint32{0, 1, 33}, many33, []uint32{1, 33}, many33,
			[]uint32{0, 0}), ReasonBound},
		{"a Reply chunk of 65 segments", lists(v2, []uint32{0, 0, 1, 65}), ReasonBound},
		{"position 2", lists(v2, []uint32{1, 2}, seg, []uint32{0, 0, 0}), ReasonPosition},
		{"an option of 0xffffffff octets", words(7, 2, 32, 5, 0, 1, 0xffffffff), ReasonBound},
		{"an option without its padding", append(words(7, 2, 32, 5, 0, 1, 1), 'x'), ReasonTruncated},
	}
}

type badHeaderCase struct {
	name string
	in   []byte
	want Reason
}

func TestBadHeaders(t *testing.T) {
	for _, tt := range badHeaderCases() {
		h, payload, err := ParseHeader(tt.in)
		if reasonOf(err) != tt.want || payload != nil {
			t.Errorf("%s: in %x: got %v, want %v", tt.name, tt.in, err, tt.want)
		}
		if len(tt.in) >= MinHeaderLen && h.XID != 7 {
			t.Errorf("%s: XID %v was not kept for an answer", tt.name, h.XID)
		}
	}
}

// TestTruncated cuts every vector at every octet.
func TestTruncated(t *testing.T) {
	for _, tt := range vecHeaders {
		in := unhex(tt.hex)
		in = in[:len(in)-len(tt.payload)/2]
		for n := range in {
			// V2-5.2.4-5, V2-5.2-16: no shorter header can be read, however it ends
			if h, _, err := ParseHeader(in[:n]); err == nil {
				t.Errorf("%s: %d of %d octets read as %v", tt.name, n, len(in), &h)
			}
		}
	}
}

// TestLeastSizes: V2-5.2-16.
func TestLeastSizes(t *testing.T) {
	for _, tt := range []struct {
		name string
		h    Header
		want int
	}{
		{"MSG", Header{Vers: 2}, 36},
		{"NOMSG", Header{Vers: 2, Proc: ProcNOMSG}, 36},
		{"OPTIONAL", Header{Vers: 2, Proc: ProcOPTIONAL}, 28},
		{"BAD_XDR", Header{Vers: 2, Proc: ProcERROR, Error: TransportError{Code: ErrBadXDR}}, 20},
		{"VERS", Header{Vers: 2, Proc: ProcERROR, Error: TransportError{Code: ErrVers}}, 28},
		{"CANT_REPLY", Header{Vers: 2, Proc: ProcERROR, Error: TransportError{Code: ErrCantReply}}, 32},
		{"version one MSG", Header{Vers: 1}, 28},
		{"ERR_CHUNK", Header{Vers: 1, Proc: ProcERROR, Error: TransportError{Code: ErrChunk}}, 20},
	} {
		if b, err := tt.h.AppendBinary(nil); err != nil || len(b) != tt.want {
			t.Errorf("%s: %d octets (%v), want %d", tt.name, len(b), err, tt.want)
		}
	}
}

func TestUnsendable(t *testing.T) {
	seg := Segment{0xa, 64, 0x1000}
	many := make(Chunk, MaxSegments+1)
	for _, tt := range []struct {
		name string
		h    Header
		want string
	}{
		{"version 3", Header{Vers: 3}, "version 3"},
		// V2-R1-10, V2-5.2-13
		{"MSGP", Header{Vers: 1, Proc: ProcMSGP}, "not in version 1"},
		{"DONE", Header{Vers: 1, Proc: ProcDONE}, "not in version 1"},
		{"OPTIONAL in version one", Header{Vers: 1, Proc: ProcOPTIONAL}, "not in version 1"},
		{"procedure 6", Header{Vers: 2, Proc: 6}, "not in version 2"},
		{"an error of version two in version one", Header{Vers: 1, Proc: ProcERROR,
			Error: TransportError{Code: ErrInvalProc}}, "INVAL_PROC in version 1"},
		{"no error", Header{Vers: 2, Proc: ProcERROR}, "error 0 in version 2"},
		{"direction 2", Header{Vers: 2, Direction: 2}, "direction 2"},
		// V2-5.2.3-3, V2-5.2.3-1
		{"a handle of another call", Header{Vers: 2, InvHandle: 0xb, Reply: Chunk{seg}}, "0000000b may be invalidated"},
		{"position 6", Header{Vers: 2, Reads: []ReadSegment{{6, seg}}}, "no multiple of four"},
		{"65 segments to read", Header{Vers: 2, Reads: make([]ReadSegment, MaxSegments+1)}, "more than 64"},
		{"65 segments to write", Header{Vers: 2, Writes: []Chunk{many}}, "more than 64"},
		{"65 chunks", Header{Vers: 2, Writes: make([]Chunk, MaxSegments+1)}, "more than 64"},
		{"65 segments to reply", Header{Vers: 2, Reply: many}, "more than 64"},
		{"too much information", Header{Vers: 2, Proc: ProcOPTIONAL, OptInfo: make([]byte, MaxOptInfo+1)}, "1025 octets"},
	} {
		switch b, err := tt.h.AppendBinary(nil); {
		case err == nil:
			t.Errorf("%s: no error, want one", tt.name)
		case !strings.Contains(err.Error(), tt.want):
			t.Errorf("%s: %q does not say %q", tt.name, err.Error(), tt.want)
		case len(b) != 0:
			t.Errorf("%s: b has %v elements, want 0", tt.name, len(b))
		}
	}
	// A responder copies what it was given, good or not (V2-5.2.3-4).
	h := Header{Vers: 2, Direction: DirReply, InvHandle: 0xb}
	if _, err := h.AppendBinary(nil); err != nil {
		t.Errorf("a copied handle: %v", err)
	}
}

// TestVersionOne: version two only adds two words in front of the lists, and
// what version one has and version two has not is read.
func TestVersionOne(t *testing.T) {
	h, _, err := ParseHeader(unhex(vecChunks))
	if err != nil {
		t.Fatal(err)
	}
	h.Vers, h.InvHandle = Version1, 0
	b, err := h.AppendBinary(nil)
	want := unhex(vecChunks[:8] + "00000001" + vecChunks[16:32] + vecChunks[48:]) // V2-1-1, 8797-1-2
	if err != nil || string(b) != string(want) {
		t.Errorf("got %x (%v)\nwant %x", b, err, want)
	}
	for _, tt := range []struct {
		name string
		in   []byte
		want Header
	}{
		{"DONE", words(7, 1, 32, 3), Header{XID: 7, Vers: 1, Credit: 32, Proc: ProcDONE}},
		{"MSGP", words(7, 1, 32, 2, 512, 4096, 0, 0, 0),
			Header{XID: 7, Vers: 1, Credit: 32, Proc: ProcMSGP, Align: 512, Thresh: 4096}},
		{"ERR_CHUNK", words(7, 1, 32, 4, 2), Header{XID: 7, Vers: 1, Credit: 32, Proc: ProcERROR,
			Error: TransportError{Code: ErrChunk}}},
		// V2-5.2-5: a chunk may have no segments, which is not the same as no chunk
		{"a chunk without segments", words(7, 1, 32, 1, 0, 1, 0, 0, 1, 0),
			Header{XID: 7, Vers: 1, Credit: 32, Proc: ProcNOMSG, Writes: []Chunk{{}}, Reply: Chunk{}}},
	} {
		if h, _, err := ParseHeader(tt.in); err != nil || !reflect.DeepEqual(h, tt.want) {
			t.Errorf("%s: got %+v (%v)\nwant %+v", tt.name, h, err, tt.want)
		}
	}
}

func TestMessageDirection(t *testing.T) {
	call, reply := words(7, 0, 2), words(7, 1, 0)
	read := []ReadSegment{{0, Segment{1, 2, 3}}}
	for _, tt := range []struct {
		name    string
		h       Header
		payload []byte
		want    Direction
		ok      bool
	}{
		// V2-4.2-2: version two says it without a look into the payload
		{"version two", Header{Vers: 2, Direction: DirReply}, call, DirReply, true},
		{"OPTIONAL", Header{Vers: 2, Proc: ProcOPTIONAL, Direction: DirReply}, nil, DirReply, true},
		{"ERROR", Header{Vers: 2, Proc: ProcERROR}, nil, DirReply, true}, // V2-5.2.2-3
		{"version one call", Header{Vers: 1}, call, DirCall, true},
		{"version one reply", Header{Vers: 1}, reply, DirReply, true},
		{"version one, neither", Header{Vers: 1}, words(7, 2), 0, false},
		{"version one, no payload", Header{Vers: 1}, nil, 0, false},
		{"version one Long Call", Header{Vers: 1, Proc: ProcNOMSG, Reads: read, Reply: Chunk{}}, nil, DirCall, true},
		{"version one Long Reply", Header{Vers: 1, Proc: ProcNOMSG, Reply: Chunk{}}, nil, DirReply, true},
		{"version one NOMSG without chunks", Header{Vers: 1, Proc: ProcNOMSG}, nil, 0, false},
	} {
		switch d, ok := tt.h.MessageDirection(tt.payload); {
		case ok != tt.ok:
			t.Errorf("%s: ok is %v, want %v", tt.name, ok, tt.ok)
		case ok && d != tt.want:
			t.Errorf("%s: d is %v, want %v", tt.name, d, tt.want)
		}
	}
}

func TestStrings(t *testing.T) {
	var all []string
	for _, tt := range vecHeaders {
		all = append(all, tt.h.String())
	}
	got := strings.Join(all, "\n")
	want := `v1 MSG xid=11223344 credit=32
v2 MSG xid=11223344 credit=32 CALL
v2 MSG xid=11223344 credit=32 REPLY
v2 ERROR xid=11223344 credit=32 VERS 1-1
v3 ERROR xid=11223344 credit=32 VERS 1-2
v2 ERROR xid=11223344 credit=32 BAD_XDR
v2 ERROR xid=11223344 credit=32 CANT_REPLY processed=true segment=2 needed=65536
v2 ERROR xid=11223344 credit=32 INVAL_PROC
v2 ERROR xid=11223344 credit=32 INVAL_OPTION
v2 OPTIONAL xid=11223344 credit=32 CALL type=0x80000001 info=68656c6c6f
v2 MSG xid=11223344 credit=32 CALL inv=0a0b0c0d read@68=0a0b0c0d:4096@0x1000 write=[0a0b0c0e:8192@0x2000] reply=[0a0b0c0f:16384@0x3000]`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
