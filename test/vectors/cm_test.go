package vectors

import (
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

const (
	commA = 0x11223344
	commB = 0x55667788
	guidA = 0x0002c90300001111
	guidB = 0x0002c90300002222
	tid   = 0x0000000500000001
)

func cmFile() file {
	f := file{Title: "CM messages that set up, refuse and end an IPoIB connection: whole MADs of 256 octets"}
	rc := requestOf(serviceid.RFC, ib.RC)
	uc := requestOf(serviceid.RFC, ib.UC)
	uc.StartingPSN, uc.RetryCount, uc.SRQ = 0x000010, 0, false
	legacy := requestOf(serviceid.Legacy, ib.RC)
	legacy.RetryCount, legacy.RNRRetryCount, legacy.ResponderResources = 0, 0, 4
	f.samples = []sample{
		req("REQ, RC", "A dials B with the service ID of RFC 4755", rc),
		req("REQ, UC", "", uc),
		req("REQ, Linux", "the values that Linux sends, and its service ID", legacy),
		mra(), rep(), rtu(),
		rej("REJ 28, Consumer Reject", "B refuses the REQ of A because REQs crossed and the address of B is larger",
			mad.RejConsumer),
		rej("REJ 8, invalid service ID", "B is an RFC 4755 host with another UD QPN: its own is in the private data",
			mad.RejInvalidServiceID),
		rej("REJ 26, invalid path MTU", "the Receive MTU of A is too small for B, whose own is in the private data",
			mad.RejInvalidPathMTU),
		dreq(), drep(),
	}
	for i := range f.samples {
		s := &f.samples[i]
		s.decode = func(b []byte) (any, error) { _, m, err := mad.Parse(b); return m, err }
		s.encode = func() ([]byte, error) { return s.want.(mad.Message).AppendBinary(nil) }
	}
	return f
}

// mad appends the common header of a MAD.
func (s *sample) mad(transaction uint64, attr mad.AttrID) {
	const clause = "IBA volume 1 chapter 13"
	s.word("base version", 8, 1, clause)
	s.word("management class", 8, 7, clause)
	s.word("class version", 8, 2, clause)
	s.word("method: Send", 8, 3, clause)
	s.word("status", 16, 0, clause)
	s.word("class specific", 16, 0, clause)
	s.word("transaction ID", 64, transaction, clause)
	s.word("attribute ID", 16, uint64(attr), "IBA volume 1 chapter 12")
	s.word("reserved", 16, 0, clause)
	s.word("attribute modifier", 32, 0, clause)
}

// ids appends both communication IDs.
func (s *sample) ids(local, remote mad.CommID, clause string) {
	s.word("local communication ID", 32, uint64(local), clause)
	s.word("remote communication ID", 32, uint64(remote), clause)
}

func privateOf(b []byte, qpn ib.QPN) {
	p, _ := encap.PrivateData{QPN: qpn, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(b, p)
}

func requestOf(form serviceid.Form, transport ib.Transport) mad.REQ {
	m := mad.REQ{
		TransactionID: tid, LocalCommID: commA, ServiceID: serviceid.New(form, linkB.QPN), LocalCAGUID: guidA,
		LocalQPN: 0x0000a1, RemoteCMResponseTimeout: 18, Transport: transport, StartingPSN: 0x123456,
		LocalCMResponseTimeout: 18, RetryCount: 7, PKey: ib.DefaultPKey, PathMTU: ib.MTU1024, RNRRetryCount: 7,
		MaxCMRetries: 7, SRQ: true, Primary: mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID,
			LocalGID: linkA.GID, RemoteGID: linkB.GID, FlowLabel: 0x12345, PacketRate: 3, TrafficClass: 0x20,
			HopLimit: 64, SL: 5, LocalACKTimeout: 14},
	}
	privateOf(m.PrivateData[:], linkA.QPN)
	return m
}

func flag1(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func req(name, note string, m mad.REQ) sample {
	const clause = "IBA volume 1 table 106"
	s := sample{name: name, note: note, want: m}
	s.mad(m.TransactionID, mad.AttrREQ)
	s.word("local communication ID", 32, uint64(m.LocalCommID), clause)
	s.word("reserved, vendor ID", 32, 0, clause)
	s.word("service ID", 64, uint64(m.ServiceID), "RFC 4755 section 3.5")
	s.word("local CA GUID", 64, uint64(m.LocalCAGUID), clause)
	s.word("reserved", 32, 0, clause)
	s.word("local Q_Key", 32, 0, clause)
	s.word("local QPN", 24, uint64(m.LocalQPN), clause)
	s.word("responder resources", 8, uint64(m.ResponderResources), clause)
	s.word("local EECN", 24, 0, clause)
	s.word("initiator depth", 8, uint64(m.InitiatorDepth), clause)
	s.word("remote EECN", 24, 0, clause)
	s.word("remote CM response timeout", 5, uint64(m.RemoteCMResponseTimeout), clause)
	s.word("transport service type: 0 RC, 1 UC", 2, uint64(m.Transport), clause)
	s.word("end-to-end flow control", 1, 0, clause)
	s.word("starting PSN", 24, uint64(m.StartingPSN), clause)
	s.word("local CM response timeout", 5, uint64(m.LocalCMResponseTimeout), clause)
	s.word("retry count", 3, uint64(m.RetryCount), clause)
	s.word("P_Key", 16, uint64(m.PKey), clause)
	s.word("path packet payload MTU: 3 is 1024", 4, uint64(m.PathMTU), clause)
	s.word("RDC exists", 1, 0, clause)
	s.word("RNR retry count", 3, uint64(m.RNRRetryCount), clause)
	s.word("max CM retries", 4, uint64(m.MaxCMRetries), clause)
	s.word("SRQ", 1, flag1(m.SRQ), clause)
	s.word("extended transport type", 3, 0, clause)
	s.path("primary ", m.Primary, clause)
	s.raw("alternate path: none", make([]byte, 44), clause)
	s.private(encap.PrivateData{QPN: linkA.QPN, ReceiveMTU: 65524}, 0, mad.REQPrivateLen)
	return s
}

func (s *sample) path(what string, p mad.PathInfo, clause string) {
	s.word(what+"local port LID", 16, uint64(p.LocalLID), clause)
	s.word(what+"remote port LID", 16, uint64(p.RemoteLID), clause)
	s.raw(what+"local port GID", p.LocalGID[:], clause)
	s.raw(what+"remote port GID", p.RemoteGID[:], clause)
	s.word(what+"flow label", 20, uint64(p.FlowLabel), clause)
	s.word("reserved", 6, 0, clause)
	s.word(what+"packet rate", 6, uint64(p.PacketRate), clause)
	s.word(what+"traffic class", 8, uint64(p.TrafficClass), clause)
	s.word(what+"hop limit", 8, uint64(p.HopLimit), clause)
	s.word(what+"SL", 4, uint64(p.SL), clause)
	s.word(what+"subnet local", 1, flag1(p.SubnetLocal), clause)
	s.word("reserved", 3, 0, clause)
	s.word(what+"local ACK timeout", 5, uint64(p.LocalACKTimeout), clause)
	s.word("reserved", 3, 0, clause)
}

func mra() sample {
	const clause = "IBA volume 1 table 107"
	m := mad.MRA{TransactionID: tid, LocalCommID: commB, RemoteCommID: commA, MessageMRAed: mad.KindREQ,
		ServiceTimeout: 19}
	privateOf(m.PrivateData[:], linkB.QPN)
	s := sample{name: "MRA", note: "B has the REQ and takes longer to answer", want: m}
	s.mad(m.TransactionID, mad.AttrMRA)
	s.ids(m.LocalCommID, m.RemoteCommID, clause)
	s.word("message MRAed: 0 REQ", 2, 0, clause)
	s.word("reserved", 6, 0, clause)
	s.word("service timeout", 5, uint64(m.ServiceTimeout), clause)
	s.word("reserved", 3, 0, clause)
	s.private(encap.PrivateData{QPN: linkB.QPN, ReceiveMTU: 65524}, 0, mad.MRAPrivateLen)
	return s
}

func rep() sample {
	const clause = "IBA volume 1 table 110"
	m := mad.REP{TransactionID: tid, LocalCommID: commB, RemoteCommID: commA, LocalQPN: 0x0000b2, StartingPSN: 0x654321,
		TargetACKDelay: 15, RNRRetryCount: 7, SRQ: true, LocalCAGUID: guidB}
	privateOf(m.PrivateData[:], linkB.QPN)
	s := sample{name: "REP", note: "B accepts", want: m}
	s.mad(m.TransactionID, mad.AttrREP)
	s.ids(m.LocalCommID, m.RemoteCommID, clause)
	s.word("local Q_Key", 32, 0, clause)
	s.word("local QPN", 24, uint64(m.LocalQPN), clause)
	s.word("reserved, vendor ID", 8, 0, clause)
	s.word("local EE context number", 24, 0, clause)
	s.word("reserved, vendor ID", 8, 0, clause)
	s.word("starting PSN", 24, uint64(m.StartingPSN), clause)
	s.word("reserved, vendor ID", 8, 0, clause)
	s.word("responder resources", 8, 0, clause)
	s.word("initiator depth", 8, 0, clause)
	s.word("target ACK delay", 5, uint64(m.TargetACKDelay), clause)
	s.word("failover accepted", 2, 0, clause)
	s.word("end-to-end flow control", 1, 0, clause)
	s.word("RNR retry count", 3, uint64(m.RNRRetryCount), clause)
	s.word("SRQ", 1, 1, clause)
	s.word("reserved", 4, 0, clause)
	s.word("local CA GUID", 64, uint64(m.LocalCAGUID), clause)
	s.private(encap.PrivateData{QPN: linkB.QPN, ReceiveMTU: 65524}, 0, mad.REPPrivateLen)
	return s
}

func rtu() sample {
	m := mad.RTU{TransactionID: tid, LocalCommID: commA, RemoteCommID: commB}
	privateOf(m.PrivateData[:], linkA.QPN)
	s := sample{name: "RTU", note: "A is ready to use", want: m}
	s.mad(m.TransactionID, mad.AttrRTU)
	s.ids(m.LocalCommID, m.RemoteCommID, "IBA volume 1 table 111")
	s.private(encap.PrivateData{QPN: linkA.QPN, ReceiveMTU: 65524}, 0, mad.RTUPrivateLen)
	return s
}

func rej(name, note string, reason mad.RejectReason) sample {
	const clause = "IBA volume 1 table 108"
	m := mad.REJ{TransactionID: tid, RemoteCommID: commA, MessageRejected: mad.KindREQ, Reason: reason}
	privateOf(m.PrivateData[:], linkB.QPN)
	s := sample{name: name, note: note, want: m}
	s.mad(m.TransactionID, mad.AttrREJ)
	s.ids(0, m.RemoteCommID, clause)
	s.word("message rejected: 0 REQ", 2, 0, clause)
	s.word("reserved", 6, 0, clause)
	s.word("reject info length", 7, 0, clause)
	s.word("reserved", 1, 0, clause)
	s.word("reason", 16, uint64(reason), clause)
	s.raw("additional reject information", make([]byte, mad.ARILen), clause)
	s.private(encap.PrivateData{QPN: linkB.QPN, ReceiveMTU: 65524}, 0, mad.REJPrivateLen)
	return s
}

func dreq() sample {
	const clause = "IBA volume 1 table 112"
	m := mad.DREQ{TransactionID: tid + 1, LocalCommID: commA, RemoteCommID: commB, RemoteQPN: 0x0000b2}
	s := sample{name: "DREQ", note: "A ends the connection; RFC 4755 section 6 is about setting up, so the " +
		"private data is zero", want: m}
	s.mad(m.TransactionID, mad.AttrDREQ)
	s.ids(m.LocalCommID, m.RemoteCommID, clause)
	s.word("remote QPN", 24, uint64(m.RemoteQPN), clause)
	s.word("reserved", 8, 0, clause)
	s.raw("private data: none", make([]byte, mad.DREQPrivateLen), clause)
	return s
}

func drep() sample {
	const clause = "IBA volume 1 table 113"
	m := mad.DREP{TransactionID: tid + 1, LocalCommID: commB, RemoteCommID: commA}
	s := sample{name: "DREP", note: "B has ended it", want: m}
	s.mad(m.TransactionID, mad.AttrDREP)
	s.ids(m.LocalCommID, m.RemoteCommID, clause)
	s.raw("private data: none", make([]byte, mad.DREPPrivateLen), clause)
	return s
}
