// Command app is the only file of the test image carrel/scratch: an image without shell, libc or any other program.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// With arguments it prints them and ends; without, it waits to be told to stop.
func main() {
	if len(os.Args) > 1 {
		fmt.Println(strings.Join(os.Args[1:], " "))
		return
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
}
