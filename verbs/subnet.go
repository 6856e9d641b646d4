package verbs

import (
	"time"

	"ipoibcm/ib"
)

// A SubnetProvider is a provider whose port may be an InfiniBand one, with a subnet
// administrator. It is optional: ask with a type assertion.
type SubnetProvider interface {
	// SubnetPort returns access to subnet administration; nil on Ethernet.
	SubnetPort() SubnetPort
}

// A SubnetPort is access to QP 1 for the MADs of subnet administration: class 3, version 2. Package
// sa makes and reads them.
type SubnetPort interface {
	// SendSubnet sends m once, unreliably. If m asks for an answer, the port accepts that answer
	// until wait is over.
	SendSubnet(m *SubnetMAD, wait time.Duration) error
	// SubnetMADs is the bounded channel of MADs that arrive. When its reader lags, MADs are dropped
	// and counted. It is closed with the provider.
	SubnetMADs() <-chan *SubnetMAD
	// Reports reports whether SubnetMADs also delivers the administrator's reports, which answer no
	// question. The kernel gives the reports of a port to one process only.
	Reports() bool
}

// A SubnetMAD is a MAD of subnet administration. The addresses are those of the other port: the
// destination on output, the sender on input.
type SubnetMAD struct {
	LID  ib.LID
	SL   uint8
	QPN  ib.QPN
	QKey ib.QKey
	PKey ib.PKey // zero on output means the default P_Key
	// GID, FlowLabel and TrafficClass are fields of the GRH. With a zero GID there is no GRH.
	GID          ib.GID
	FlowLabel    uint32
	TrafficClass uint8
	Data         [MADLen]byte
}

// A GroupQP is a UD queue pair that attaches to a group by MGID and LID, as InfiniBand needs.
// [QP.AttachMulticast] does not serve there, because only the subnet administrator knows the LID.
// It is optional.
type GroupQP interface {
	QP
	AttachGroup(mgid ib.GID, mlid ib.LID) error
	DetachGroup(mgid ib.GID, mlid ib.LID) error
}
