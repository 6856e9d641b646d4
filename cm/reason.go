package cm

import "ipoibcm/wire/mad"

// A Reason is why a REJ was sent.
type Reason = mad.RejectReason

// Reasons that this module sends or looks for.
const (
	ReasonNoQP             = mad.RejNoQP
	ReasonNoResources      = mad.RejNoResources
	ReasonTimeout          = mad.RejTimeout // ARI: the sender's CA GUID
	ReasonUnsupported      = mad.RejUnsupported
	ReasonInvalidServiceID = mad.RejInvalidServiceID
	ReasonInvalidTransport = mad.RejInvalidTransport
	ReasonStale            = mad.RejStaleConnection
	ReasonInvalidGID       = mad.RejInvalidPrimaryGID
	ReasonInvalidMTU       = mad.RejInvalidPathMTU
	ReasonConsumer         = mad.RejConsumer // the verdict of a crossing, among others
	ReasonDuplicateCommID  = mad.RejDuplicateCommID
	ReasonInvalidVersion   = mad.RejInvalidClassVersion
)
