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

// A SubnetPort is access to QP 1 for the MADs of subnet administration: class 3,
// version 2. Package sa says what is in them.
type SubnetPort interface {
	// SendSubnet sends m once, unreliably. Where an answer is expected it is let in
	// until wait is over.
	SendSubnet(m *SubnetMAD, wait time.Duration) error
	// SubnetMADs is the bounded channel of what arrives; when the reader lags, MADs
	// are dropped and counted. It is closed with the provider.
	SubnetMADs() <-chan *SubnetMAD
	// Reports says whether the administrator's reports, which answer no question, are
	// among what arrives. There is one receiver of them on a port.
	Reports() bool
}

// A SubnetMAD is a MAD of subnet administration: to another port, or from it.
type SubnetMAD struct {
	LID  ib.LID
	SL   uint8
	QPN  ib.QPN
	QKey ib.QKey
	PKey ib.PKey // zero on output: the default
	// Of the GRH; zero GID: none.
	GID          ib.GID
	FlowLabel    uint32
	TrafficClass uint8
	Data         [MADLen]byte
}

// A GroupQP is a UD queue pair that can be attached to a group whose LID is known,
// as on InfiniBand: there [QP.AttachMulticast] does not do, because only the subnet
// administrator knows that LID. It is optional.
type GroupQP interface {
	QP
	AttachGroup(mgid ib.GID, mlid ib.LID) error
	DetachGroup(mgid ib.GID, mlid ib.LID) error
}
