package mad

import (
	"encoding/binary"
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire"
)

// REQPrivateLen is the length of the private data of a REQ, in octets.
const REQPrivateLen = 92

// A REQ asks for a connection. "Local" is its sender.
type REQ struct {
	TransactionID           uint64
	LocalCommID             CommID
	ServiceID               serviceid.ID
	LocalCAGUID             ib.GUID
	LocalQKey               ib.QKey // 0 for RC and UC
	LocalQPN                ib.QPN
	ResponderResources      uint8        // inbound RDMA READs the sender offers to serve
	InitiatorDepth          uint8        // outbound RDMA READs the sender will have open
	RemoteCMResponseTimeout ib.Timeout   // how long the sender waits for an answer
	Transport               ib.Transport // RC, UC, RD, or 3: see ExtendedTransport
	EndToEndFlowControl     bool
	StartingPSN             ib.PSN     // the receiver of the REQ starts sending with it
	LocalCMResponseTimeout  ib.Timeout // how long the sender may take to answer
	RetryCount              uint8      // 0 to 7
	PKey                    ib.PKey
	PathMTU                 ib.MTU
	RDCExists               bool
	RNRRetryCount           uint8 // 0 to 7; 7 is for ever
	MaxCMRetries            uint8 // 0 to 15
	SRQ                     bool
	ExtendedTransport       uint8 // 3 bits; 1 is XRC
	Primary, Alternate      PathInfo
	PrivateData             [REQPrivateLen]byte
}

// Attr returns AttrREQ.
func (REQ) Attr() AttrID { return AttrREQ }
func (REQ) isMessage()   {}

// AppendBinary appends the MAD of m to b. The error is always nil.
func (m REQ) AppendBinary(b []byte) ([]byte, error) {
	b, d := begin(b, AttrREQ, MethodSend, m.TransactionID)
	binary.BigEndian.PutUint32(d, uint32(m.LocalCommID))
	binary.BigEndian.PutUint64(d[8:], uint64(m.ServiceID))
	binary.BigEndian.PutUint64(d[16:], uint64(m.LocalCAGUID))
	binary.BigEndian.PutUint32(d[28:], uint32(m.LocalQKey))
	wire.PutUint24(d[32:], uint32(m.LocalQPN))
	d[35], d[39] = m.ResponderResources, m.InitiatorDepth
	d[43] = byte(m.RemoteCMResponseTimeout)<<3 | byte(m.Transport&3)<<1 | wire.Bit(m.EndToEndFlowControl, 1)
	wire.PutUint24(d[44:], uint32(m.StartingPSN))
	d[47] = byte(m.LocalCMResponseTimeout)<<3 | m.RetryCount&7
	binary.BigEndian.PutUint16(d[48:], uint16(m.PKey))
	d[50] = byte(m.PathMTU)<<4 | wire.Bit(m.RDCExists, 8) | m.RNRRetryCount&7
	d[51] = m.MaxCMRetries<<4 | wire.Bit(m.SRQ, 8) | m.ExtendedTransport&7
	m.Primary.put(d[52:])
	m.Alternate.put(d[96:])
	copy(d[140:], m.PrivateData[:])
	return b, nil
}

// UnmarshalBinary sets m from the MAD in the first Len octets of b.
func (m *REQ) UnmarshalBinary(b []byte) error { return unmarshal(m, b, decodeREQ) }

func decodeREQ(h Header, d []byte) REQ {
	return REQ{
		TransactionID:           h.TransactionID,
		LocalCommID:             CommID(binary.BigEndian.Uint32(d)),
		ServiceID:               serviceid.ID(binary.BigEndian.Uint64(d[8:])),
		LocalCAGUID:             ib.GUID(binary.BigEndian.Uint64(d[16:])),
		LocalQKey:               ib.QKey(binary.BigEndian.Uint32(d[28:])),
		LocalQPN:                ib.QPN(wire.Uint24(d[32:])),
		ResponderResources:      d[35],
		InitiatorDepth:          d[39],
		RemoteCMResponseTimeout: ib.Timeout(d[43] >> 3),
		Transport:               ib.Transport(d[43] >> 1 & 3),
		EndToEndFlowControl:     d[43]&1 != 0,
		StartingPSN:             ib.PSN(wire.Uint24(d[44:])),
		LocalCMResponseTimeout:  ib.Timeout(d[47] >> 3),
		RetryCount:              d[47] & 7,
		PKey:                    ib.PKey(binary.BigEndian.Uint16(d[48:])),
		PathMTU:                 ib.MTU(d[50] >> 4),
		RDCExists:               d[50]&8 != 0,
		RNRRetryCount:           d[50] & 7,
		MaxCMRetries:            d[51] >> 4,
		SRQ:                     d[51]&8 != 0,
		ExtendedTransport:       d[51] & 7,
		Primary:                 readPathInfo(d[52:]),
		Alternate:               readPathInfo(d[96:]),
		PrivateData:             [REQPrivateLen]byte(d[140:]),
	}
}

// String prints what identifies the connection.
func (m REQ) String() string {
	return fmt.Sprintf("REQ comm=%v service=%v qpn=%v psn=%v %v mtu=%v", m.LocalCommID, m.ServiceID, m.LocalQPN,
		m.StartingPSN, m.Transport, m.PathMTU)
}
