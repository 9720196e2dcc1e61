import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

/** The JDK's own client: it offers h2c with each first request of a connection, body and all. */
public class Offering {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var body = arguments[1].getBytes();
        // With its length, and in chunks.
        for (var publisher : new HttpRequest.BodyPublisher[] {
            BodyPublishers.ofByteArray(body), BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body))
        }) {
            var request = HttpRequest.newBuilder(URI.create(arguments[0])).POST(publisher).build();
            var answer = client.send(request, BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body());
        }
    }
}
