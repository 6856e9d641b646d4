package verbs

// OneThread is the reason [Threader.Steering] gives when it steers nothing because the provider has
// one data thread.
const OneThread = "there is one thread"

// A Threader is a provider that can have several data threads. It is optional: ask with a type
// assertion. A provider that is no Threader has one data thread.
type Threader interface {
	// Threads is the number of data threads.
	Threads() int
	// Thread returns the provider as seen by data thread i, from 0 on. Completion queues made from
	// it belong to that thread, and so do the queue pairs whose receives complete there. The thread
	// runs their handlers ([CallbackCQ]), and polls the descriptor given to [FDPoller]. Everything
	// else belongs to the whole provider, whose own methods stand for thread 0.
	Thread(i int) Provider
	// Steering returns whether the kernel or the device delivers packets directly to the thread of
	// their queue pair. If not, the thread that receives a packet passes it on.
	Steering() Offload
}
