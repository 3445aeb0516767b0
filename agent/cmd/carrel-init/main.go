// Command carrel-init is the first process of a workspace, and its SSH server.
package main

import (
	"os"

	"github.com/carrel-dev/carrel/agent/initd"
)

func main() { os.Exit(initd.Main(os.Args)) }
