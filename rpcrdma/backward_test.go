package rpcrdma

import "testing"

// TestBackward runs testdata/backward-*.txt: calls of the server to the client.
//
//	backward-ready          not before the client has heard the version and its program is ready: V2-R1-19; the
//	                        version of a backward call is that of the forward calls: V2-R1-17
//	backward-credits        XIDs and credits of their own: V2-4.2-1, V2-R1-15, V2-R1-17, V2-5.2.2-1
//	backward-chunks         V2-3.1-1, V2-R1-18; a client does not answer what may be a reply: V2-R1-8
//	backward-invalidation   V2-3.1-2
//	backward-threshold      V2-R1-16
//	backward-idle           V2-R1-20
func TestBackward(t *testing.T) { playScripts(t, "backward-*") }
