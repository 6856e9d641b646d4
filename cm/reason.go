package cm

import "fmt"

// A Reason is why a REJ was sent, a 16-bit wire code (IBA 12.6.7.2).
type Reason uint16

// Reasons that somebody here sends or looks for.
const (
	ReasonNoQP             Reason = 1
	ReasonNoResources      Reason = 3
	ReasonTimeout          Reason = 4 // ARI: the sender's CA GUID
	ReasonUnsupported      Reason = 5
	ReasonInvalidServiceID Reason = 8
	ReasonInvalidTransport Reason = 9
	ReasonStale            Reason = 10
	ReasonInvalidGID       Reason = 12 // primary remote GID
	ReasonInvalidMTU       Reason = 26
	ReasonConsumer         Reason = 28 // the verdict of a crossing, among others
	ReasonDuplicateCommID  Reason = 30
	ReasonInvalidVersion   Reason = 31
)

// String prints the code.
func (r Reason) String() string { return fmt.Sprintf("reason %d", uint16(r)) }
