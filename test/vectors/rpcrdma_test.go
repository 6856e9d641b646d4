package vectors

import (
	"ipoibcm/rpcrdma"
)

func rpcrdmaFile() file {
	f := file{Title: "RPC-over-RDMA: private data of RFC 8797, transport headers of versions one and two " +
		"(draft-cel-nfsv4-rpcrdma-version-two-02)"}
	for _, tt := range []struct {
		name     string
		p        rpcrdma.PrivateData
		reserved uint64
	}{
		{"RFC 8797, 4096 both ways, remote invalidation",
			rpcrdma.PrivateData{RemoteInv: true, SendSize: 4096, RecvSize: 4096}, 0},
		{"RFC 8797, the least and the most", rpcrdma.PrivateData{SendSize: 1024, RecvSize: 262144}, 0},
		{"RFC 8797, reserved bits set", rpcrdma.PrivateData{RemoteInv: true, SendSize: 4096, RecvSize: 4096}, 0x7f},
	} {
		f.samples = append(f.samples, announced(tt.name, tt.p, tt.reserved))
	}
	for _, tt := range []struct {
		name, note string
		h          rpcrdma.Header
	}{
		{"version one, call", "no chunks", rpcrdma.Header{XID: 0x11223344, Vers: 1, Credit: 32}},
		{"version two, call", "no chunks", rpcrdma.Header{XID: 0x11223344, Vers: 2, Credit: 32}},
		{"version two, reply", "no chunks", rpcrdma.Header{XID: 0x11223344, Vers: 2, Credit: 32,
			Direction: rpcrdma.DirReply}},
		{"version two, call with every list", "the responder may invalidate the handle of the Read list", everyList()},
		{"version two, ERR_VERS", "a responder that knows version one answers version two",
			failed(2, rpcrdma.TransportError{Code: rpcrdma.ErrVers, Low: 1, High: 1})},
		{"version two, BAD_XDR", "", failed(2, rpcrdma.TransportError{Code: rpcrdma.ErrBadXDR})},
		{"version two, CANT_REPLY", "the program has run; segment 2 needs 65536 octets", failed(2,
			rpcrdma.TransportError{Code: rpcrdma.ErrCantReply, Processed: true, SegmentIndex: 2, LengthNeeded: 65536})},
		{"version two, INVAL_PROC", "", failed(2, rpcrdma.TransportError{Code: rpcrdma.ErrInvalProc})},
		{"version two, INVAL_OPTION", "", failed(2, rpcrdma.TransportError{Code: rpcrdma.ErrInvalOption})},
		{"version two, OPTIONAL", "", rpcrdma.Header{XID: 0x11223344, Vers: 2, Credit: 32, Proc: rpcrdma.ProcOPTIONAL,
			OptType: 0x80000001, OptInfo: []byte("hello")}},
	} {
		f.samples = append(f.samples, transport(tt.name, tt.note, tt.h))
	}
	f.Decisions = thresholds()
	return f
}

func announced(name string, p rpcrdma.PrivateData, reserved uint64) sample {
	const clause = "RFC 8797 section 4"
	s := sample{name: name, want: p}
	s.word("format identifier", 32, 0xf6ab0e18, clause)
	s.word("version", 8, 1, clause)
	s.word("reserved", 7, reserved, clause)
	s.word("R, remote invalidation", 1, flag1(p.RemoteInv), clause)
	s.word("send size", 8, uint64(p.SendSize/1024-1), "RFC 8797 section 4.2")
	s.word("receive size", 8, uint64(p.RecvSize/1024-1), "RFC 8797 section 4.2")
	s.decode = func(b []byte) (any, error) { var p rpcrdma.PrivateData; err := p.UnmarshalBinary(b); return p, err }
	if reserved == 0 {
		s.encode = func() ([]byte, error) { return p.AppendBinary(nil) }
	}
	return s
}

func everyList() rpcrdma.Header {
	return rpcrdma.Header{XID: 0x11223344, Vers: 2, Credit: 32, InvHandle: 0x0a0b0c0d,
		Reads: []rpcrdma.ReadSegment{{Position: 68,
			Segment: rpcrdma.Segment{Handle: 0x0a0b0c0d, Length: 4096, Offset: 0x1000}}},
		Writes: []rpcrdma.Chunk{{{Handle: 0x0a0b0c0e, Length: 8192, Offset: 0x2000}}},
		Reply:  rpcrdma.Chunk{{Handle: 0x0a0b0c0f, Length: 16384, Offset: 0x3000}}}
}

func failed(v rpcrdma.Version, e rpcrdma.TransportError) rpcrdma.Header {
	return rpcrdma.Header{XID: 0x11223344, Vers: v, Credit: 32, Proc: rpcrdma.ProcERROR, Error: e}
}

func transport(name, note string, h rpcrdma.Header) sample {
	s := sample{name: "RPC-over-RDMA " + name, note: note, want: h}
	const fixed = "RFC 8166 section 4.1.2"
	s.word("rdma_xid", 32, uint64(h.XID), fixed)
	s.word("rdma_vers", 32, uint64(h.Vers), fixed)
	s.word("rdma_credit", 32, uint64(h.Credit), fixed)
	s.word("procedure", 32, uint64(h.Proc), fixed)
	const clause = "version two section 5.2"
	switch h.Proc {
	case rpcrdma.ProcMSG:
		if h.Vers == 2 {
			s.word("rdma_direction", 32, uint64(h.Direction), clause)
			s.word("rdma_inv_handle", 32, uint64(h.InvHandle), "version two section 5.2.3")
		}
		s.lists(&h)
	case rpcrdma.ProcERROR:
		s.word("error code", 32, uint64(h.Error.Code), "version two section 5.2.4")
		switch h.Error.Code {
		case rpcrdma.ErrVers:
			s.word("rdma_vers_low", 32, uint64(h.Error.Low), clause)
			s.word("rdma_vers_high", 32, uint64(h.Error.High), clause)
		case rpcrdma.ErrCantReply:
			s.word("rdma_processed", 32, flag1(h.Error.Processed), clause)
			s.word("rdma_segment_index", 32, uint64(h.Error.SegmentIndex), clause)
			s.word("rdma_length_needed", 32, uint64(h.Error.LengthNeeded), clause)
		}
	case rpcrdma.ProcOPTIONAL:
		s.word("rdma_optdir", 32, uint64(h.Direction), clause)
		s.word("rdma_opttype", 32, uint64(h.OptType), clause)
		s.word("rdma_optinfo: length", 32, uint64(len(h.OptInfo)), clause)
		s.raw("rdma_optinfo", h.OptInfo, clause)
		s.raw("rdma_optinfo: padding", make([]byte, -len(h.OptInfo)&3), "RFC 4506 section 4.10")
	}
	s.encode = func() ([]byte, error) { return h.AppendBinary(nil) }
	s.decode = func(b []byte) (any, error) { h, _, err := rpcrdma.ParseHeader(b); return h, err }
	return s
}

// lists appends the three chunk lists.
func (s *sample) lists(h *rpcrdma.Header) {
	clause := "RFC 8166 section 4.1.2"
	if h.Vers == 2 {
		clause = "version two section 5.2"
	}
	for _, r := range h.Reads {
		s.word("Read list: another entry", 32, 1, clause)
		s.word("Read list: position", 32, uint64(r.Position), clause)
		s.segment("Read list: ", r.Segment, clause)
	}
	s.word("Read list: end", 32, 0, clause)
	for _, c := range h.Writes {
		s.word("Write list: another chunk", 32, 1, clause)
		s.chunk("Write list: ", c, clause)
	}
	s.word("Write list: end", 32, 0, clause)
	if h.Reply == nil {
		s.word("Reply chunk: none", 32, 0, clause)
		return
	}
	s.word("Reply chunk: present", 32, 1, clause)
	s.chunk("Reply chunk: ", h.Reply, clause)
}

func (s *sample) chunk(what string, c rpcrdma.Chunk, clause string) {
	s.word(what+"segments", 32, uint64(len(c)), clause)
	for _, x := range c {
		s.segment(what, x, clause)
	}
}

func (s *sample) segment(what string, x rpcrdma.Segment, clause string) {
	s.word(what+"handle", 32, uint64(x.Handle), clause)
	s.word(what+"length", 32, uint64(x.Length), clause)
	s.word(what+"offset", 64, x.Offset, clause)
}

// thresholds are what two ends may send in one message of version one.
func thresholds() (all []decision) {
	both := func(n int) rpcrdma.PrivateData { return rpcrdma.PrivateData{SendSize: n, RecvSize: n} }
	for _, tt := range []struct {
		name           string
		client, server rpcrdma.PrivateData
		call, reply    int
	}{
		{"both the same", both(4096), both(4096), 4096, 4096},
		{"the server takes less", both(16384), rpcrdma.PrivateData{SendSize: 16384, RecvSize: 2048}, 2048, 16384},
		{"the client sends less than the server takes", rpcrdma.PrivateData{SendSize: 1024, RecvSize: 8192},
			both(4096), 1024, 4096},
		{"the server is silent", both(4096), rpcrdma.DefaultPrivateData(), 1024, 1024},
	} {
		all = append(all, decision{Rule: "inline", Name: tt.name, Clause: "RFC 8797 section 4.2",
			Given: object{"client_send": tt.client.SendSize, "client_receive": tt.client.RecvSize,
				"server_send": tt.server.SendSize, "server_receive": tt.server.RecvSize},
			Want: object{"call": tt.call, "reply": tt.reply},
			decide: func() object {
				call, reply := rpcrdma.Inline(tt.client, tt.server)
				return object{"call": call, "reply": reply}
			}})
	}
	return all
}
