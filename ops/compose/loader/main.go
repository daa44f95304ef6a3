// Loads a compose file as docker compose does and prints it, normalized, as JSON.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	log.SetFlags(0)
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithOsEnv)
	if err != nil {
		log.Fatal(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	text, err := project.MarshalJSON()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(text))
}
